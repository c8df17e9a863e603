"""TFDS builders of our own, in plain Python: prepared and read without TensorFlow, in the array_record format.

Each is imported where it is used, since it imports tensorflow_datasets.
"""
