"""The vocabulary: algorithms, parameters, payloads, selectors, settings, errors, files and hardware."""
