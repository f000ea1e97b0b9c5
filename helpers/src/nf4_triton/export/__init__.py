"""Write what was trained on quantized weights as one folder in 16 bit. Data goes one way through these files.

sources.py finds the folders and opens what is read. formats.py reads one quantized weight. model.py
builds the model without weights, as training used it. private.py says what its tensors are called. adapter.py
says which of them an adapter changes, and merges. plan.py says what each new tensor is made of, and makes it.
card.py makes OUT's README.md. write.py writes all. export.py is the public function. verify.py compares OUT
with what was trained. bounds.py limits what a stranger's configs cost. problems.py has the errors.
"""
