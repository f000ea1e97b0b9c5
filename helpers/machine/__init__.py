"""What this machine is, what it lacks, and how that is installed. Imports nothing of ours."""
