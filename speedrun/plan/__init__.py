"""What a program will take on devices that are not here."""
