"""Write what was trained in 4 bit as one folder in 16 bit. Data goes one way through these files.

checkpoint.py reads one 4-bit weight. sources.py finds the folders and opens what is read. model.py builds the
model without weights and says what its tensors are called. adapter.py says which of them an adapter changes,
and merges. plan.py says what each new tensor is made of, and makes it. write.py writes them. export.py is the
public function. problems.py says how the others refuse.
"""
