"""Subtitles -> dialogs: lines, who says them, where dialogs end, and what is undesired."""
