"""Maps over optree pytrees that know the dotted path of every leaf."""

from sparsefn.tree.alike import check_grads as check_grads
from sparsefn.tree.alike import check_like as check_like
from sparsefn.tree.alike import leaves_like as leaves_like
from sparsefn.tree.alike import map_with_path
from sparsefn.tree.alike import same_structure as same_structure
from sparsefn.tree.alike import structure_error as structure_error
from sparsefn.tree.leaves import Leaves as Leaves
from sparsefn.tree.leaves import Tree as Tree
from sparsefn.tree.leaves import flatten, leaves_of, opened
from sparsefn.tree.leaves import identical as identical
from sparsefn.tree.leaves import leaves_at as leaves_at
from sparsefn.tree.leaves import none_paths as none_paths
from sparsefn.tree.leaves import paths as paths
from sparsefn.tree.leaves import tops as tops
from sparsefn.tree.leaves import with_leaves as with_leaves
from sparsefn.tree.leaves import zipped as zipped
from sparsefn.tree.mends import check_not_lazy as check_not_lazy
from sparsefn.tree.mends import check_tree as check_tree
from sparsefn.tree.mends import mend_of as mend_of
from sparsefn.tree.mends import warn_without_names as warn_without_names
from sparsefn.tree.values import all_finite as all_finite
from sparsefn.tree.values import check_globs as check_globs
from sparsefn.tree.values import choose, copied
from sparsefn.tree.values import first_match as first_match
from sparsefn.tree.values import fix_sizes as fix_sizes
from sparsefn.tree.values import glob_match as glob_match
from sparsefn.tree.values import where_leaves as where_leaves
from sparsefn.tree.values import wide as wide

__all__ = ["choose", "copied", "flatten", "leaves_of", "map_with_path", "opened"]
__dir__ = __all__.copy
