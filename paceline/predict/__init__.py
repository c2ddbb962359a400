"""What would happen, without running it: protocols on a virtual clock, links, device profiles."""
