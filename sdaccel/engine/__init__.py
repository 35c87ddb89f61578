"""The engine on disk: what it is (`manifest`), where it is kept (`store`), the weights it shares (`weights`)."""
