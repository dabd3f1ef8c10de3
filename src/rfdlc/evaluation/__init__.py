"""What decisions were worth."""
