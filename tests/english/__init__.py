"""The check of the project's English: words and forms that no text uses, counted per room."""
