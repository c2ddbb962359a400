"""How a model runs on a device: layer times, emulated devices, recorded passes, units to cut."""
