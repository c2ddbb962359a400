"""Training scripts that others wrote, with the few lines that Paceline asks for."""
