"""How models reach people and other tools: predictions, reports, export, a server,
scikit-learn.
"""
