"""Maps over optree pytrees that know the dotted path of every leaf."""

from sparsefn.core.tree.alike import check_grads as check_grads
from sparsefn.core.tree.alike import check_like as check_like
from sparsefn.core.tree.alike import leaves_like as leaves_like
from sparsefn.core.tree.alike import map_with_path
from sparsefn.core.tree.alike import same_structure as same_structure
from sparsefn.core.tree.alike import structure_error as structure_error
from sparsefn.core.tree.leaves import Leaves as Leaves
from sparsefn.core.tree.leaves import Tree as Tree
from sparsefn.core.tree.leaves import flatten, leaves_of, opened
from sparsefn.core.tree.leaves import identical as identical
from sparsefn.core.tree.leaves import leaves_at as leaves_at
from sparsefn.core.tree.leaves import none_paths as none_paths
from sparsefn.core.tree.leaves import paths as paths
from sparsefn.core.tree.leaves import tops as tops
from sparsefn.core.tree.leaves import with_leaves as with_leaves
from sparsefn.core.tree.leaves import zipped as zipped
from sparsefn.core.tree.mends import check_not_lazy as check_not_lazy
from sparsefn.core.tree.mends import check_not_meta as check_not_meta
from sparsefn.core.tree.mends import check_tree as check_tree
from sparsefn.core.tree.mends import mend_of as mend_of
from sparsefn.core.tree.mends import warn_without_names as warn_without_names
from sparsefn.core.tree.operations import all_finite as all_finite
from sparsefn.core.tree.operations import check_globs as check_globs
from sparsefn.core.tree.operations import choose, copied
from sparsefn.core.tree.operations import first_match as first_match
from sparsefn.core.tree.operations import fix_sizes as fix_sizes
from sparsefn.core.tree.operations import glob_match as glob_match
from sparsefn.core.tree.operations import where_leaves as where_leaves
from sparsefn.core.tree.operations import wide as wide

__all__ = ["choose", "copied", "flatten", "leaves_of", "map_with_path", "opened"]
__dir__ = __all__.copy
