"""Names that the science of a record may use: modules with their functions, builtins, attributes of values.

Everything not listed is reported. Everything here only computes values: it reads no file, clock or environment, returns
no module or frame, and changes no foreign object. Missing names that do the same belong here; say why if it is not
obvious.
"""

import sys


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Of numpy and jax.numpy, without functions that access files or raw memory, or set global options.
_ARRAYS = _words(
    "abs absolute acos acosh add all allclose amax amin angle any append apply_along_axis apply_over_axes "
    "arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argpartition argsort "
    "argwhere around array array_equal array_equiv array_split asarray asin asinh astype atan atan2 atanh "
    "atleast_1d atleast_2d atleast_3d average bartlett bfloat16 bincount bitwise_and bitwise_count "
    "bitwise_invert bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman "
    "block bool bool_ broadcast_arrays broadcast_shapes broadcast_to c_ can_cast cbrt cdouble ceil choose "
    "clip column_stack complex128 complex64 complexfloating compress concat concatenate conj conjugate "
    "convolve copy copysign corrcoef correlate cos cosh count_nonzero cov cross csingle cumprod cumsum "
    "cumulative_prod cumulative_sum deg2rad degrees delete diag diag_indices diag_indices_from diagflat "
    "diagonal diff digitize divide divmod dot double dsplit dstack dtype e ediff1d einsum einsum_path "
    "empty empty_like equal euler_gamma exp exp2 expand_dims expm1 extract eye fabs fill_diagonal finfo "
    "flatnonzero flexible flip fliplr flipud float16 float32 float4_e2m1fn float64 float6_e2m3fn "
    "float6_e3m2fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu float_power floating floor floor_divide fmax fmin fmod frexp "
    "fromfunction full full_like gcd geomspace gradient greater greater_equal hamming hanning heaviside "
    "histogram histogram2d histogram_bin_edges histogramdd hsplit hstack hypot i0 identity iinfo imag "
    "index_exp indices inexact inf inner insert int1 int16 int2 int32 int4 int64 int8 integer interp "
    "intersect1d invert isclose iscomplex iscomplexobj isdtype isfinite isin isinf isnan isneginf "
    "isposinf isreal isrealobj isscalar issubdtype iterable ix_ kaiser kron lcm ldexp left_shift less "
    "less_equal lexsort linspace log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not "
    "logical_or logical_xor logspace mask_indices matmul matrix_transpose matvec max maximum mean median "
    "meshgrid mgrid min minimum mod modf moveaxis multiply nan nan_to_num nanargmax nanargmin nancumprod "
    "nancumsum nanmax nanmean nanmedian nanmin nanpercentile nanprod nanquantile nanstd nansum nanvar "
    "generic ndarray ndim negative newaxis nextafter nonzero not_equal number ogrid ones ones_like outer pad "
    "partition percentile permute_dims pi piecewise place poly polyadd polyder polydiv polyfit polyint "
    "polymul polysub polyval positive pow power prod promote_types ptp quantile r_ rad2deg radians ravel "
    "ravel_multi_index real reciprocal remainder repeat reshape resize result_type right_shift rint roll "
    "rollaxis roots rot90 round s_ searchsorted select setdiff1d setxor1d shape sign signbit "
    "signedinteger sin sinc single sinh size sort sort_complex spacing split sqrt square squeeze stack "
    "std subtract sum swapaxes take take_along_axis tan tanh tensordot tile trace transpose trapezoid tri "
    "tril tril_indices tril_indices_from trim_zeros triu triu_indices triu_indices_from true_divide trunc "
    "uint uint1 uint16 uint2 uint32 uint4 uint64 uint8 union1d unique unique_all unique_counts "
    "unique_inverse unique_values unravel_index unsignedinteger unstack unwrap vander var vdot vecdot "
    "vecmat vectorize vsplit vstack where zeros zeros_like "
)
_LAX = _words(
    "ConvDimensionNumbers ConvGeneralDilatedDimensionNumbers DotAlgorithm DotAlgorithmPreset "
    "DotDimensionNumbers FftType GatherDimensionNumbers GatherScatterMode Precision PrecisionLike "
    "RaggedDotDimensionNumbers RandomAlgorithm RoundingMethod ScatterDimensionNumbers abs acos acosh add "
    "all_gather all_to_all approx_max_k approx_min_k argmax argmin asin asinh associative_scan atan atan2 "
    "atanh axis_index axis_size batch_matmul bessel_i0e bessel_i1e betainc bitcast_convert_type "
    "bitwise_and bitwise_not bitwise_or bitwise_xor broadcast broadcast_in_dim broadcast_like "
    "broadcast_shapes broadcast_to_rank broadcasted_iota cbrt ceil clamp clz collapse complex composite "
    "concatenate cond conj conv conv_dimension_numbers conv_general_dilated conv_general_dilated_local "
    "conv_general_dilated_patches conv_general_permutations conv_general_shape_tuple conv_shape_tuple "
    "conv_transpose conv_transpose_shape_tuple conv_with_general_padding convert_element_type cos cosh "
    "cumlogsumexp cummax cummin cumprod cumsum custom_linear_solve custom_root digamma div dot "
    "dot_general dtype dynamic_index_in_dim dynamic_slice dynamic_slice_in_dim "
    "dynamic_update_index_in_dim dynamic_update_slice dynamic_update_slice_in_dim empty eq erf erf_inv "
    "erfc exp exp2 expand_dims expm1 fft floor fori_loop full full_like gather ge gt igamma igamma_grad_a "
    "igammac imag index_in_dim index_take integer_pow iota is_finite le lgamma log log1p logistic lt map "
    "max min mul mulhi ne neg nextafter optimization_barrier pad pbroadcast pcast platform_dependent pmax "
    "pmean pmin polygamma population_count pow ppermute pshuffle psum psum_scatter pswapaxes "
    "ragged_all_to_all ragged_dot ragged_dot_general random_gamma_grad real reciprocal reduce reduce_and "
    "reduce_max reduce_min reduce_or reduce_precision reduce_prod reduce_sum reduce_window "
    "reduce_window_shape_tuple reduce_xor rem reshape rev rng_bit_generator rng_uniform round rsqrt "
    "scaled_dot scan scatter scatter_add scatter_apply scatter_max scatter_min scatter_mul scatter_sub "
    "select select_n shape_as_value shift_left shift_right_arithmetic shift_right_logical sign sin sinh "
    "slice slice_in_dim sort sort_key_val split sqrt square squeeze stack stop_gradient sub switch tan "
    "tanh tile top_k transpose unstack while_loop with_sharding_constraint zeta "
)
_NN = _words(
    "celu dot_product_attention elu gelu get_scaled_dot_general_config glu hard_sigmoid hard_silu "
    "hard_swish hard_tanh identity leaky_relu log1mexp log_sigmoid log_softmax logmeanexp logsumexp mish "
    "one_hot relu relu6 scaled_dot_general scaled_matmul selu sigmoid silu soft_sign softmax softplus "
    "sparse_plus sparse_sigmoid squareplus standardize swish tanh "
)
_RANDOM = _words(
    "PRNGKey ball bernoulli beta binomial bits categorical cauchy chisquare choice clone dirichlet "
    "double_sided_maxwell exponential f fold_in gamma generalized_normal geometric gumbel key key_data "
    "key_dtype key_impl laplace loggamma logistic lognormal maxwell multinomial multivariate_normal "
    "normal orthogonal pareto permutation poisson rademacher randint rayleigh split t triangular "
    "truncated_normal uniform wald weibull_min wrap_key_data "
)
_LINALG = _words(
    "cholesky cond cross det diagonal eig eigh eigvals eigvalsh inv lstsq matmul matrix_norm matrix_power "
    "matrix_rank matrix_transpose multi_dot norm outer pinv qr slogdet solve svd svdvals tensordot "
    "tensorinv tensorsolve trace vecdot vector_norm "
)
_FFT = _words(
    "fft fft2 fftfreq fftn fftshift hfft ifft ifft2 ifftn ifftshift ihfft irfft irfft2 irfftn rfft rfft2 "
    "rfftfreq rfftn "
)
_INITIALIZERS = _words(
    "Initializer constant delta_orthogonal glorot_normal glorot_uniform he_normal he_uniform "
    "kaiming_normal kaiming_uniform lecun_normal lecun_uniform normal ones orthogonal truncated_normal "
    "uniform variance_scaling xavier_normal xavier_uniform zeros "
)
_PALLAS = _words(
    "ANY BlockDim BlockSpec Blocked BoundedSlice Buffered CompilerParams CostEstimate Element GridSpec MemorySpace "
    "Slice Squeezed align_to broadcast_to cdiv core_map ds dslice empty empty_like kernel load loop max_contiguous "
    "multiple_of next_power_of_2 no_block_spec num_programs pallas_call program_id reciprocal run_scoped run_state "
    "semaphore squeezed store swap strides_from_shape when with_scoped atomic_add atomic_max atomic_min"
)
_TRITON = _words(
    "CompilerParams approx_tanh atomic_add atomic_and atomic_cas atomic_max atomic_min atomic_or atomic_xchg "
    "atomic_xor debug_barrier dot load max_contiguous store"
)
_MOSAIC = _words(
    "ACC Barrier BlockSpec ClusterBarrier CompilerParams GMEM Layout LoweringSemantics MemorySpace Mesh REGS RefUnion "
    "SMEM ShapeDtypeStruct SwizzleTransform TMEM TMEMLayout Tiling TilingTransform TransposeTransform "
    "WGMMAAccumulatorRef WarpMesh async_load_tmem async_prefetch async_store_tmem atomic_add barrier_arrive "
    "barrier_test barrier_wait broadcasted_iota cluster_ref commit_smem commit_tmem copy_gmem_to_smem "
    "copy_smem_to_gmem dynamic_scheduling_loop emit_pipeline emit_pipeline_warp_specialized find_swizzle kernel "
    "layout_cast load multicast_ref nd_loop planar_snake set_max_registers tcgen05_commit_arrive tcgen05_mma "
    "transform_ref transpose_ref wait_load_tmem wait_smem_to_gmem warp_map wgmma wgmma_accumulator_load wgmma_wait"
)

#: Permits every public name of a module that is no module itself; see `is_permitted`.
ANY = _words("*")
#: Submodules of those modules.
_INSIDE = _words(
    "assignment contrib experimental losses microbatching perturbations projections schedules second_order transforms "
    "tree tree_utils jax jnp numpy np optax"
)

MODULES: dict[str, frozenset[str]] = {
    "jax": _words(
        "Array NamedSharding P ShapeDtypeStruct checkpoint checkpoint_policies closure_convert custom_gradient "
        "custom_jvp custom_vjp default_matmul_precision device_get eval_shape float0 fwd_and_bwd grad hessian jacfwd "
        "jacobian jacrev jit jvp linear_transpose linearize named_call named_scope remat reshard shard_map "
        "smap softmax_custom_jvp typeof value_and_grad vjp vmap"
    ),
    "jax.numpy": _ARRAYS,
    "jax.numpy.linalg": _LINALG,
    "jax.numpy.fft": _FFT,
    "jax.lax": _LAX,
    "jax.nn": _NN,
    "jax.nn.initializers": _INITIALIZERS,
    "jax.random": _RANDOM,
    "jax.ops": _words("segment_max segment_min segment_prod segment_sum"),
    "jax.sharding": _words(
        "AbstractMesh AxisType Mesh NamedSharding PartitionSpec Sharding SingleDeviceSharding get_abstract_mesh reshard"
    ),
    "jax.tree": _words(
        "all broadcast flatten flatten_with_path leaves leaves_with_path map map_with_path reduce reduce_associative "
        "structure transpose unflatten"
    ),
    # Not `register_dataclass`: it reads attributes whose names are strings.
    "jax.tree_util": _words(
        "DictKey FlattenedIndexKey GetAttrKey KeyPath Partial PyTreeDef SequenceKey all_leaves keystr "
        "register_pytree_node_class register_pytree_with_keys_class register_static tree_all "
        "tree_broadcast tree_flatten tree_flatten_with_path tree_leaves tree_leaves_with_path tree_map "
        "tree_map_with_path tree_reduce tree_structure tree_transpose tree_unflatten"
    ),
    "jax.flatten_util": _words("ravel_pytree"),
    "jax.typing": _words("ArrayLike DTypeLike"),
    "jax.scipy": frozenset(),
    "jax.scipy.special": _words(
        "entr erf erfc erfinv expit gammaln log_ndtr log_softmax logit logsumexp ndtr ndtri "
        "softmax xlog1py xlogy"
    ),
    "jax.experimental": frozenset(),
    "jax.experimental.pallas": _PALLAS,
    "jax.experimental.pallas.triton": _TRITON,
    "jax.experimental.pallas.mosaic_gpu": _MOSAIC,
    "jax.experimental.shard_map": _words("shard_map"),
    "numpy": _ARRAYS,
    "numpy.linalg": _LINALG,
    "numpy.fft": _FFT,
    "optax": ANY,
    "optax.contrib": ANY,
    "optax.losses": ANY,
    "optax.projections": ANY,
    "optax.schedules": ANY,
    "optax.transforms": ANY,
    "optax.tree": ANY,
    "optax.tree_utils": ANY,
    "__future__": _words("annotations"),
    "abc": _words("ABC abstractmethod"),
    "bisect": ANY,
    "collections": _words("ChainMap Counter OrderedDict defaultdict deque namedtuple"),
    "collections.abc": ANY,
    "contextlib": _words("contextmanager nullcontext"),
    "dataclasses": _words(
        "FrozenInstanceError InitVar KW_ONLY MISSING asdict astuple dataclass field fields is_dataclass replace"
    ),
    "fractions": _words("Fraction"),
    # Not `wraps` and `update_wrapper`: they read and write attributes whose names are strings.
    "functools": _words("cache cached_property cmp_to_key lru_cache partial reduce total_ordering"),
    "heapq": _words("heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest"),
    "importlib": frozenset(),
    "importlib.util": _words(
        "find_spec"
    ),  # of a plain name only: imports nothing, and returns whether the package exists
    "itertools": ANY,
    "math": ANY,
    "numbers": _words("Complex Integral Number Rational Real"),
    # Not `attrgetter` and `methodcaller`: their names are strings.
    "operator": _words(
        "abs add and_ eq floordiv ge gt inv itemgetter le lt matmul mod mul ne neg not_ or_ pow sub truediv xor"
    ),
    "statistics": _words("fmean mean median stdev variance"),
    "types": _words("MappingProxyType NoneType"),
    # Not `get_type_hints` and `ForwardRef`: they evaluate text. Not `TypedDict`, and nothing of `enum`: their classes
    # can have annotations of any name, and `dataclass` writes such names into code that it runs.
    "typing": _words(
        "Annotated Any Callable ClassVar Concatenate Final Generic Iterable Iterator Literal Mapping NamedTuple Never "
        "NewType NoReturn Optional ParamSpec Protocol Self Sequence TYPE_CHECKING TypeAlias TypeVar Union "
        "Unpack assert_never cast overload override runtime_checkable"
    ),
    "zlib": _words("adler32 crc32"),
}

#: Builtins, without `getattr` and others that compute names, and `type`, which returns classes.
BUILTINS = _words(
    "ArithmeticError AssertionError AttributeError Ellipsis Exception False FloatingPointError ImportError "
    "IndexError KeyError LookupError ModuleNotFoundError NameError None NotImplemented NotImplementedError "
    "OverflowError RecursionError RuntimeError StopIteration SyntaxError True TypeError ValueError ZeroDivisionError "
    "abs all any ascii bin bool bytes callable chr classmethod complex dict divmod enumerate filter float frozenset "
    "hash hex int isinstance issubclass iter len list map max min next oct ord pow property range repr reversed "
    "round set slice sorted staticmethod str sum super tuple zip __name__"
)

#: Attributes of arrays, references, shapes, strings, tables, functions and JAX objects. Names that the science itself
#: defines are permitted as well.
ATTRIBUTES = _words(
    # Arrays, references of kernels, and what they are indexed with.
    "T mT add all any apply argmax argmin argsort astype at clip conj cumprod cumsum diagonal divide dot dtype flat "
    "flatten get imag item itemsize max mean min mul multiply nbytes ndim nonzero power prod ravel real repeat reshape "
    "round set shape size sort squeeze std sum swapaxes take tolist trace transpose var view weak_type "
    "eps bits smallest_normal tiny inexact outer accumulate reduce "
    # Meshes, shardings, trees.
    "axis_names axis_sizes axis_types device_kind devices idx key local_devices manual_axis_type mesh num_leaves "
    "platform sharding spec unflatten varying vma "
    # Functions and optimisers.
    "args defjvp defjvps defvjp func get_allocations init keywords update "
    # What the step read from a recipe, in records up to 2026-11-22.
    "logit_cap transforms "
    # Constants of JAX.
    "Auto DEFAULT Explicit HIGH HIGHEST Manual Lane WGMMA_TRANSPOSED Warpgroup "
    # Tables, rows, strings, numbers.
    "append bit_count bit_length clear copy count difference discard encode endswith extend find fromkeys index insert "
    "intersection is_integer isdigit isdisjoint issubset issuperset items join keys lower lstrip partition pop popitem "
    "popleft appendleft remove removeprefix removesuffix replace reverse rpartition rsplit rstrip setdefault split "
    "splitlines startswith strip symmetric_difference union upper values zfill "
    # Records.
    "_asdict _fields _make _replace default default_factory getter name setter value "
    "__module__ __name__ __qualname__"
)

#: Refused even if the science defines the name: on a foreign value it gives access to more than values.
NEVER = _words(
    "ag_await ag_code ag_frame builtins bltns compile cr_await cr_code cr_frame cr_origin ctypes ctypeslib "
    "def_abstract_eval def_impl dump dumps environ exec_module f2py f_back f_builtins f_code f_globals f_locals format "
    "format_map fromfile frombuffer fromstring func_globals genfromtxt get_data gi_code gi_frame gi_yieldfrom glob "
    "host_callback import_module importlib inspect io io_callback iterdir lib load load_module loader loads loadtxt "
    "lower_as_mlir memmap modules mro obj open os pathlib pickle posix posixpath pure_callback read read_bytes "
    "read_text rglob save savetxt savez savez_compressed shutil socket spec_from_file_location subprocess sys tb_frame "
    "tb_next testing tofile unlink with_traceback write write_bytes write_text"
)

#: Methods between double underscores that a class of the science may have.
METHODS = _words(
    "__add__ __and__ __call__ __contains__ __eq__ __floordiv__ __ge__ __getitem__ __gt__ __hash__ __init__ __iter__ "
    "__le__ __len__ __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __next__ __or__ __post_init__ __pow__ __radd__ "
    "__repr__ __rmatmul__ __rmul__ __rsub__ __rtruediv__ __slots__ __str__ __sub__ __truediv__ __xor__ __all__"
)


def is_permitted(module: str, name: str) -> bool:
    """Return whether a name of a module is permitted."""
    names = MODULES.get(module, frozenset())
    if names is ANY:
        return not name.startswith("_") and name not in _INSIDE | NEVER | sys.stdlib_module_names
    return name in names
