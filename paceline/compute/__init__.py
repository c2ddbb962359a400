"""Running a model on a device: layer times, emulated devices, recorded passes, units to cut."""
