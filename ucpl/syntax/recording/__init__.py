"""The methods of the recorder by subject; `Recorder` in syntax/recorder.py is all of them together."""
