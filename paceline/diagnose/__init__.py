"""Find out why a job cannot start or stands still: the doctor, stalls, stacks, connections."""
