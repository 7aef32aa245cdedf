"""The border of the package: text and files that strangers wrote become checked values here."""
