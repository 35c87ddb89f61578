"""Small stand-ins of the WebUIs: as much of their interfaces as the extension meets, written from what they document.

`ldm` holds the torch modules, in the original layout; `a1111` and `forge` the hosts around them.
"""
