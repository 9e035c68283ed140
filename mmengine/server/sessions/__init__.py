"""The routes below /v1/sessions. A session is a conversation to which later calls append texts, images and
video frames.
"""
