from specdec.utils.moved import moved_names

__all__, __dir__, __getattr__ = moved_names(__name__)
