// The host's page: its tabs are not the tab's own. Opening ours rings the tab's bell, so that it looks what has changed.
onUiTabChange(() => {
    const bell = get_uiCurrentTabContent()?.id === "tab_sdaccel" && gradioApp().querySelector("#tab_sdaccel .sd-out textarea");
    if (bell) {
        bell.value = String(Date.now());
        updateInput(bell);
    }
});
