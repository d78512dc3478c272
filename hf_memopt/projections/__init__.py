r"""The subspace of GaLore: where it lies, how a new one is found, what becomes of the moments.

A matrix with gradient G is seen as d x L, d the dimension that is projected (``geometry.py``). With an orthonormal
basis P (d x r) the optimizer works on P^T G (r x L), and its update U comes back as P U.

==========  ==========================================================  ==========================  =================
refresh     new basis                                                   kept per matrix             cost
==========  ==========================================================  ==========================  =================
subspace    qr(G (G^T P_old)): one warm-started subspace iteration      P, int8 or float32          4 d r L + 2 d r^2
svd         the r leading left singular vectors of G                    P, int8 or float32          about 20 d^2 L
select      the r coordinates in which the gradient has most energy     their r numbers             d L
random      r columns of the cosine transform with random signs         how many refreshes          none
==========  ==========================================================  ==========================  =================

``subspace`` finds what ``svd`` finds when the spectrum falls off, at a fiftieth of the time, and where it does not fall
off the singular vectors of one mini-batch mean little anyway. A new matrix begins in a random subspace.

``moments.py`` says how moments follow a change of basis.
"""
