"""As much of matplotlib as a script asks for that draws and does not look."""


def use(_backend):
    pass
