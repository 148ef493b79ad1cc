"""Public spellings of ATen overloads; how to read it is in `torch_calls.py`.

Made on torch 2.13.0 by `python -m benchmarks.make_torch_calls_table`; do not edit by hand.
"""

SAME_NAME = {
    "method": """
abs_.default acos_.default acosh_.default add_.Tensor addbmm_.default addcdiv_.default addcmul_.default
addmm_.default addmv_.default addr_.default as_strided_.default asin_.default asinh_.default
atan2_.default atan_.default atanh_.default baddbmm_.default bernoulli_.Tensor bernoulli_.float
bitwise_and_.Scalar bitwise_and_.Tensor bitwise_left_shift_.Tensor bitwise_left_shift_.Tensor_Scalar
bitwise_not_.default bitwise_or_.Scalar bitwise_or_.Tensor bitwise_right_shift_.Tensor
bitwise_right_shift_.Tensor_Scalar bitwise_xor_.Scalar bitwise_xor_.Tensor cauchy_.default ceil_.default
clamp_.Tensor clamp_.default clamp_max_.Tensor clamp_max_.default clamp_min_.Tensor clamp_min_.default
conj_physical_.default copy_.default copysign_.Scalar copysign_.Tensor cos_.default cosh_.default
cumprod_.default cumsum_.default deg2rad_.default dense_dim.default digamma_.default div_.Tensor
div_.Tensor_mode eq_.Scalar eq_.Tensor erf_.default erfc_.default erfinv_.default exp2_.default
exp_.default expand.default expm1_.default exponential_.default fill_.Scalar fill_.Tensor floor_.default
floor_divide_.Tensor fmod_.Scalar fmod_.Tensor frac_.default gcd_.default ge_.Scalar ge_.Tensor
geometric_.default gt_.Scalar gt_.Tensor heaviside_.default hypot_.default i0_.default igamma_.default
igammac_.default index_add_.default index_copy_.default index_fill_.int_Scalar index_fill_.int_Tensor
index_put_.default index_reduce_.default is_coalesced.default is_pinned.default is_set_to.default
lcm_.default ldexp_.default le_.Scalar le_.Tensor lerp_.Scalar lerp_.Tensor lgamma_.default
log10_.default log1p_.default log2_.default log_.default log_normal_.default logical_and_.default
logical_not_.default logical_or_.default logical_xor_.default logit_.default lt_.Scalar lt_.Tensor
masked_fill_.Scalar masked_fill_.Tensor masked_scatter_.default mul_.Tensor mvlgamma_.default
nan_to_num_.default ne_.Scalar ne_.Tensor neg_.default new_empty.default new_empty_strided.default
new_full.default new_ones.default new_zeros.default nextafter_.default normal_.default
polygamma_.default pow_.Scalar pow_.Tensor put_.default rad2deg_.default random_.default random_.from
random_.to reciprocal_.default relu_.default remainder_.Scalar remainder_.Tensor renorm_.default
repeat.default resize_.default resize_as_.default resize_as_sparse_.default round_.decimals
round_.default rsqrt_.default scatter_.reduce scatter_.src scatter_.value scatter_.value_reduce
scatter_add_.default scatter_reduce_.two set_.default sgn_.default sigmoid_.default sign_.default
sin_.default sinc_.default sinh_.default sparse_dim.default sparse_mask.default sparse_resize_.default
sparse_resize_and_clear_.default sqrt_.default squeeze_.default squeeze_.dim squeeze_.dims sub_.Tensor
t_.default tan_.default tanh_.default to_mkldnn.default to_padded_tensor.default transpose_.default
tril_.default triu_.default trunc_.default unfold.default uniform_.default unsqueeze_.default
values.default view.default xlogy_.Scalar_Other xlogy_.Tensor zero_.default
""",
    "torch": """
abs.default abs.out acos.default acos.out acosh.default acosh.out add.Tensor add.out addbmm.default
addbmm.out addcdiv.default addcdiv.out addcmul.default addcmul.out addmm.default addmm.dtype
addmm.dtype_out addmm.out addmv.default addmv.out addr.default addr.out affine_grid_generator.default
alias_copy.default alias_copy.out all.all_out all.default all.dim all.dims all.dims_out all.out
allclose.default amax.default amax.out amin.default amin.out aminmax.default aminmax.out angle.default
angle.out any.all_out any.default any.dim any.dims any.dims_out any.out arange.default arange.out
arange.start arange.start_out arange.start_step argmax.default argmax.out argmin.default argmin.out
as_strided.default as_strided_copy.default as_strided_copy.out as_strided_scatter.default asin.default
asin.out asinh.default asinh.out atan.default atan.out atan2.default atan2.out atanh.default atanh.out
baddbmm.default baddbmm.dtype baddbmm.dtype_out baddbmm.out bartlett_window.default
bartlett_window.periodic batch_norm_backward_elemt.default batch_norm_backward_reduce.default
batch_norm_elemt.default batch_norm_elemt.out batch_norm_gather_stats.default
batch_norm_gather_stats_with_counts.default batch_norm_stats.default batch_norm_update_stats.default
bernoulli.default bernoulli.out bernoulli.p binary_cross_entropy_with_logits.default bincount.default
binomial.default bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_and.Scalar_out bitwise_and.Tensor
bitwise_and.Tensor_out bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor
bitwise_left_shift.Tensor_Scalar bitwise_left_shift.Tensor_Scalar_out bitwise_left_shift.Tensor_out
bitwise_not.default bitwise_not.out bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_or.Scalar_out
bitwise_or.Tensor bitwise_or.Tensor_out bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor
bitwise_right_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar_out bitwise_right_shift.Tensor_out
bitwise_xor.Scalar bitwise_xor.Scalar_Tensor bitwise_xor.Scalar_out bitwise_xor.Tensor
bitwise_xor.Tensor_out blackman_window.default blackman_window.periodic bmm.default bmm.dtype
bmm.dtype_out bmm.out bucketize.Scalar bucketize.Tensor bucketize.Tensor_out cat.default cat.out
ccol_indices_copy.default ccol_indices_copy.out ceil.default ceil.out celu.default celu_.default
channel_shuffle.default cholesky.default cholesky.out cholesky_inverse.default cholesky_inverse.out
cholesky_solve.default cholesky_solve.out clamp.Tensor clamp.Tensor_out clamp.default clamp.out
clamp_max.Tensor clamp_max.Tensor_out clamp_max.default clamp_max.out clamp_min.Tensor
clamp_min.Tensor_out clamp_min.default clamp_min.out clone.default col_indices_copy.default
col_indices_copy.out complex.default complex.out conj_physical.out constant_pad_nd.default
conv_tbc.default convolution.default copysign.Scalar copysign.Scalar_out copysign.Tensor copysign.out
cos.default cos.out cosh.default cosh.out count_nonzero.default count_nonzero.dim_IntList
crow_indices_copy.default crow_indices_copy.out cudnn_affine_grid_generator.default
cudnn_batch_norm.default cudnn_batch_norm.out cudnn_convolution.default cudnn_convolution.out
cudnn_convolution_add_relu.default cudnn_convolution_relu.default cudnn_convolution_transpose.default
cudnn_grid_sampler.default cummax.default cummax.out cummin.default cummin.out cumprod.default
cumprod.out cumsum.default cumsum.out deg2rad.default deg2rad.out dequantize.self dequantize.tensors
detach.default detach_copy.default detach_copy.out diag_embed.default diagonal.default
diagonal_copy.default diagonal_copy.out diagonal_scatter.default digamma.default digamma.out
dist.default div.Tensor div.Tensor_mode div.out div.out_mode dot.default dot.out embedding.default
embedding_renorm_.default empty.memory_format empty_like.default empty_permuted.default
empty_quantized.default empty_strided.default eq.Scalar eq.Scalar_out eq.Tensor eq.Tensor_out
equal.default erf.default erf.out erfc.default erfc.out erfinv.default erfinv.out exp.default exp.out
exp2.default exp2.out expand_copy.default expand_copy.out expm1.default expm1.out eye.default eye.m
eye.m_out eye.out fill.Scalar fill.Tensor flip.default floor.default floor.out floor_divide.default
floor_divide.out fmax.default fmax.out fmin.default fmin.out fmod.Scalar fmod.Scalar_out fmod.Tensor
fmod.Tensor_out frac.default frac.out frexp.Tensor frexp.Tensor_out full.default full.out
full_like.default gather.default gather.out gcd.default gcd.out ge.Scalar ge.Scalar_out ge.Tensor
ge.Tensor_out geqrf.a geqrf.default grid_sampler_2d.default grid_sampler_3d.default gt.Scalar
gt.Scalar_out gt.Tensor gt.Tensor_out hamming_window.default hamming_window.periodic
hamming_window.periodic_alpha hamming_window.periodic_alpha_beta hann_window.default
hann_window.periodic hardshrink.default hardshrink.out hash_tensor.default hash_tensor.out
heaviside.default heaviside.out histc.default histc.out histogram.bin_ct histogram.bin_ct_out
histogram.bins_tensor histogram.bins_tensor_out hspmm.default hspmm.out hypot.default hypot.out
i0.default i0.out igamma.default igamma.out igammac.default igammac.out index_add.default index_add.out
index_copy.default index_copy.out index_fill.int_Scalar index_fill.int_Tensor index_put.default
index_reduce.default index_reduce.out index_select.default index_select.out indices_copy.default
indices_copy.out int_repr.default is_same_size.default isin.Scalar_Tensor isin.Scalar_Tensor_out
isin.Tensor_Scalar isin.Tensor_Scalar_out isin.Tensor_Tensor isin.Tensor_Tensor_out isinf.default
isnan.default isneginf.default isneginf.out isposinf.default isposinf.out kaiser_window.beta
kaiser_window.default kaiser_window.periodic kthvalue.default kthvalue.values lcm.default lcm.out
ldexp.Tensor ldexp.out le.Scalar le.Scalar_out le.Tensor le.Tensor_out lerp.Scalar lerp.Scalar_out
lerp.Tensor lerp.Tensor_out lgamma.default lgamma.out linspace.Scalar_Tensor linspace.Scalar_Tensor_out
linspace.Tensor_Scalar linspace.Tensor_Scalar_out linspace.Tensor_Tensor linspace.Tensor_Tensor_out
linspace.default linspace.out log.default log.out log10.default log10.out log1p.default log1p.out
log2.default log2.out log_softmax.int_out logaddexp.default logaddexp.out logaddexp2.default
logaddexp2.out logcumsumexp.default logcumsumexp.out logical_and.default logical_and.out
logical_not.default logical_not.out logical_or.default logical_or.out logical_xor.default
logical_xor.out logit.default logit.out logspace.Scalar_Tensor logspace.Scalar_Tensor_out
logspace.Tensor_Scalar logspace.Tensor_Scalar_out logspace.Tensor_Tensor logspace.Tensor_Tensor_out
logspace.default logspace.out logsumexp.default logsumexp.out lt.Scalar lt.Scalar_out lt.Tensor
lt.Tensor_out lu_unpack.default lu_unpack.out masked_fill.Scalar masked_fill.Tensor
masked_scatter.default masked_select.default masked_select.out max.default max.dim max.dim_max
max.unary_out maximum.default maximum.out mean.default mean.dim mean.dtype_out mean.out median.default
median.dim median.dim_values min.default min.dim min.dim_min min.unary_out minimum.default minimum.out
miopen_batch_norm.default miopen_convolution.default miopen_convolution_add_relu.default
miopen_convolution_relu.default miopen_convolution_transpose.default miopen_ctc_loss.Tensor
miopen_ctc_loss.default miopen_depthwise_convolution.default miopen_rnn.default
mkldnn_adaptive_avg_pool2d.default mkldnn_adaptive_avg_pool2d.out mkldnn_convolution.default
mkldnn_linear_backward_weights.default mkldnn_max_pool2d.default mkldnn_max_pool3d.default
mkldnn_rnn_layer.default mm.default mm.dtype mm.dtype_out mm.out mode.default mode.values mul.Tensor
mul.out multinomial.default multinomial.out mv.default mv.out mvlgamma.default mvlgamma.out
nan_to_num.default nan_to_num.out nanmedian.default nanmedian.dim nanmedian.dim_values nansum.default
nansum.out narrow_copy.default narrow_copy.out native_batch_norm.default native_batch_norm.out
native_dropout.default native_group_norm.default native_layer_norm.default
native_norm.ScalarOpt_dim_dtype native_norm.default ne.Scalar ne.Scalar_out ne.Tensor ne.Tensor_out
neg.default neg.out nextafter.default nextafter.out nonzero.default nonzero.out nonzero_static.default
nonzero_static.out normal.Tensor_Tensor normal.Tensor_Tensor_out normal.Tensor_float
normal.Tensor_float_out normal.float_Tensor normal.float_Tensor_out normal.float_float
normal.float_float_out ones.default ones.out ones_like.default ormqr.default ormqr.out permute.default
permute_copy.default permute_copy.out pixel_shuffle.default pixel_unshuffle.default poisson.default
polar.default polar.out polygamma.default polygamma.out pow.Scalar pow.Scalar_out pow.Tensor_Scalar
pow.Tensor_Scalar_out pow.Tensor_Tensor pow.Tensor_Tensor_out prod.default prod.dim_int prod.int_out
put.default q_per_channel_axis.default q_per_channel_scales.default q_per_channel_zero_points.default
q_scale.default q_zero_point.default quantize_per_channel.default quantize_per_tensor.default
quantize_per_tensor.tensor_qparams quantize_per_tensor.tensors quantize_per_tensor_dynamic.default
quantized_batch_norm.default quantized_max_pool1d.default quantized_max_pool2d.default
quantized_max_pool3d.default rad2deg.default rad2deg.out rand.default rand.generator rand.out
rand_like.default rand_like.generator randint.default randint.generator randint.generator_out
randint.low randint.low_generator randint.low_generator_out randint.low_out randint.out
randint_like.Tensor randint_like.Tensor_generator randint_like.default randint_like.generator
randint_like.low_dtype randint_like.low_generator_dtype randn.default randn.generator randn_like.default
randn_like.generator randperm.default randperm.generator randperm.generator_out randperm.out
reciprocal.default reciprocal.out relu.default remainder.Scalar remainder.Scalar_Tensor
remainder.Scalar_out remainder.Tensor remainder.Tensor_out renorm.default renorm.out
repeat_interleave.Tensor roll.default rot90.default round.decimals round.decimals_out round.default
round.out row_indices_copy.default row_indices_copy.out rsqrt.default rsqrt.out rsub.Scalar rsub.Tensor
scalar_tensor.default scatter.reduce scatter.reduce_out scatter.src scatter.src_out scatter.value
scatter.value_out scatter.value_reduce scatter.value_reduce_out scatter_add.default scatter_add.out
scatter_reduce.two scatter_reduce.two_out searchsorted.Scalar searchsorted.Scalar_out
searchsorted.Tensor searchsorted.Tensor_out segment_reduce.default select.int select_copy.int
select_copy.int_out select_scatter.default sgn.default sgn.out sigmoid.default sigmoid.out sign.default
sign.out signbit.default signbit.out sin.default sin.out sinc.default sinc.out sinh.default sinh.out
slice_copy.Tensor slice_copy.Tensor_out slice_inverse.default slice_scatter.default slice_scatter.out
softmax.int_out sort.default sort.stable sort.values sort.values_stable split_copy.Tensor
split_with_sizes.default split_with_sizes_copy.default sqrt.default sqrt.out squeeze.default squeeze.dim
squeeze.dims squeeze_copy.default squeeze_copy.dim squeeze_copy.dim_out squeeze_copy.dims
squeeze_copy.dims_out squeeze_copy.out sspaddmm.out stack.default stack.out std.correction
std.correction_out std_mean.correction sub.Tensor sub.out sum.IntList_out sum.default sum.dim_IntList
t.default t_copy.default t_copy.out take.default take.out tan.default tan.out tanh.default tanh.out
threshold.default threshold.out threshold_.default topk.default topk.values trace.default transpose.int
transpose_copy.int transpose_copy.int_out triangular_solve.X triangular_solve.default tril.default
tril.out tril_indices.default triu.default triu.out triu_indices.default trunc.default trunc.out
unbind.int unbind_copy.int unfold_copy.default unfold_copy.out unsafe_split.Tensor
unsafe_split_with_sizes.default unsqueeze.default unsqueeze_copy.default unsqueeze_copy.out
values_copy.default values_copy.out var.correction var.correction_out var_mean.correction vdot.default
vdot.out view_as_complex.default view_as_complex_copy.default view_as_complex_copy.out
view_as_real.default view_as_real_copy.default view_as_real_copy.out view_copy.default view_copy.dtype
view_copy.dtype_out view_copy.out where.self where.self_out xlogy.OutScalar_Other xlogy.OutScalar_Self
xlogy.OutTensor xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor zeros.default zeros.out
zeros_like.default
""",
    "torch.nn.functional": """
avg_pool2d.default avg_pool2d.out avg_pool3d.default avg_pool3d.out elu.default elu_.default
gelu.default gelu.out hardsigmoid.default hardswish.default hardtanh_.default leaky_relu.default
leaky_relu_.default linear.out max_pool2d_with_indices.default mish.default silu.default
softplus.default softplus.out softshrink.default softshrink.out
""",
    "torch.special": """
special_airy_ai.default special_airy_ai.out special_bessel_j0.default special_bessel_j0.out
special_bessel_j1.default special_bessel_j1.out special_bessel_y0.default special_bessel_y0.out
special_bessel_y1.default special_bessel_y1.out special_chebyshev_polynomial_t.default
special_chebyshev_polynomial_t.n_scalar special_chebyshev_polynomial_t.n_scalar_out
special_chebyshev_polynomial_t.out special_chebyshev_polynomial_t.x_scalar
special_chebyshev_polynomial_t.x_scalar_out special_chebyshev_polynomial_u.default
special_chebyshev_polynomial_u.n_scalar special_chebyshev_polynomial_u.n_scalar_out
special_chebyshev_polynomial_u.out special_chebyshev_polynomial_u.x_scalar
special_chebyshev_polynomial_u.x_scalar_out special_chebyshev_polynomial_v.default
special_chebyshev_polynomial_v.n_scalar special_chebyshev_polynomial_v.n_scalar_out
special_chebyshev_polynomial_v.out special_chebyshev_polynomial_v.x_scalar
special_chebyshev_polynomial_v.x_scalar_out special_chebyshev_polynomial_w.default
special_chebyshev_polynomial_w.n_scalar special_chebyshev_polynomial_w.n_scalar_out
special_chebyshev_polynomial_w.out special_chebyshev_polynomial_w.x_scalar
special_chebyshev_polynomial_w.x_scalar_out special_entr.default special_entr.out special_erfcx.default
special_erfcx.out special_hermite_polynomial_h.default special_hermite_polynomial_h.n_scalar
special_hermite_polynomial_h.n_scalar_out special_hermite_polynomial_h.out
special_hermite_polynomial_h.x_scalar special_hermite_polynomial_h.x_scalar_out
special_hermite_polynomial_he.default special_hermite_polynomial_he.n_scalar
special_hermite_polynomial_he.n_scalar_out special_hermite_polynomial_he.out
special_hermite_polynomial_he.x_scalar special_hermite_polynomial_he.x_scalar_out special_i0e.default
special_i0e.out special_i1.default special_i1.out special_i1e.default special_i1e.out
special_laguerre_polynomial_l.default special_laguerre_polynomial_l.n_scalar
special_laguerre_polynomial_l.n_scalar_out special_laguerre_polynomial_l.out
special_laguerre_polynomial_l.x_scalar special_laguerre_polynomial_l.x_scalar_out
special_legendre_polynomial_p.default special_legendre_polynomial_p.n_scalar
special_legendre_polynomial_p.n_scalar_out special_legendre_polynomial_p.out
special_legendre_polynomial_p.x_scalar special_legendre_polynomial_p.x_scalar_out
special_log_ndtr.default special_log_ndtr.out special_modified_bessel_i0.default
special_modified_bessel_i0.out special_modified_bessel_i1.default special_modified_bessel_i1.out
special_modified_bessel_k0.default special_modified_bessel_k0.out special_modified_bessel_k1.default
special_modified_bessel_k1.out special_ndtri.default special_ndtri.out
special_scaled_modified_bessel_k0.default special_scaled_modified_bessel_k0.out
special_scaled_modified_bessel_k1.default special_scaled_modified_bessel_k1.out
special_shifted_chebyshev_polynomial_t.default special_shifted_chebyshev_polynomial_t.n_scalar
special_shifted_chebyshev_polynomial_t.n_scalar_out special_shifted_chebyshev_polynomial_t.out
special_shifted_chebyshev_polynomial_t.x_scalar special_shifted_chebyshev_polynomial_t.x_scalar_out
special_shifted_chebyshev_polynomial_u.default special_shifted_chebyshev_polynomial_u.n_scalar
special_shifted_chebyshev_polynomial_u.n_scalar_out special_shifted_chebyshev_polynomial_u.out
special_shifted_chebyshev_polynomial_u.x_scalar special_shifted_chebyshev_polynomial_u.x_scalar_out
special_shifted_chebyshev_polynomial_v.default special_shifted_chebyshev_polynomial_v.n_scalar
special_shifted_chebyshev_polynomial_v.n_scalar_out special_shifted_chebyshev_polynomial_v.out
special_shifted_chebyshev_polynomial_v.x_scalar special_shifted_chebyshev_polynomial_v.x_scalar_out
special_shifted_chebyshev_polynomial_w.default special_shifted_chebyshev_polynomial_w.n_scalar
special_shifted_chebyshev_polynomial_w.n_scalar_out special_shifted_chebyshev_polynomial_w.out
special_shifted_chebyshev_polynomial_w.x_scalar special_shifted_chebyshev_polynomial_w.x_scalar_out
special_spherical_bessel_j0.default special_spherical_bessel_j0.out special_xlog1py.default
special_xlog1py.other_scalar special_xlog1py.other_scalar_out special_xlog1py.out
special_xlog1py.self_scalar special_xlog1py.self_scalar_out special_zeta.default
special_zeta.other_scalar special_zeta.other_scalar_out special_zeta.out special_zeta.self_scalar
special_zeta.self_scalar_out
""",
    "torch.linalg": """
linalg_cholesky_ex.L linalg_cholesky_ex.default linalg_cross.default linalg_cross.out linalg_eig.default
linalg_eig.out linalg_eigvals.out linalg_householder_product.default linalg_householder_product.out
linalg_inv_ex.default linalg_inv_ex.inverse linalg_ldl_factor_ex.default linalg_ldl_factor_ex.out
linalg_ldl_solve.default linalg_ldl_solve.out linalg_lstsq.default linalg_lstsq.out linalg_lu.default
linalg_lu.out linalg_lu_factor_ex.default linalg_lu_factor_ex.out linalg_lu_solve.default
linalg_lu_solve.out linalg_matrix_exp.default linalg_pinv.atol_rtol_tensor
linalg_pinv.atol_rtol_tensor_out linalg_qr.default linalg_qr.out linalg_solve_triangular.default
linalg_solve_triangular.out linalg_vector_norm.default linalg_vector_norm.out
""",
    "torch.fft": """
fft_fftfreq.default fft_fftfreq.out fft_rfftfreq.default fft_rfftfreq.out
""",
}
"""Overloads reached by the function of their own name in a namespace, or by that method."""

RENAMED = """
_log_softmax.default torch.log_softmax -half_to_float
_softmax.default torch.softmax -half_to_float
_to_copy.default .to +copy=True
"""
"""Overloads of another name: `-argument` is not written, `+text` is, "." starts a method."""

ACCEPTS = """
_log_softmax.default half_to_float=false
_softmax.default half_to_float=false
_to_copy.default dtype=dtype layout=absent pin_memory=absent
add.Tensor self=tensor|number other=tensor|number
add.out self=tensor|number other=tensor|number
add_.Tensor other=tensor|number
all.dims dim=empty|ints|none
all.dims_out dim=empty|ints|none
any.dims dim=empty|ints|none
any.dims_out dim=empty|ints|none
arange.default device=device
arange.start device=device
arange.start_step step=number device=device
bartlett_window.default device=device
bartlett_window.periodic device=device
binary_cross_entropy_with_logits.default reduction=int
blackman_window.default device=device
blackman_window.periodic device=device
clamp.default min=number
clamp.out min=number
clamp_.default min=number
copy_.default src=tensor|number
div.Tensor self=tensor|number other=tensor|number
div.Tensor_mode self=tensor|number other=tensor|number
div.out self=tensor|number other=tensor|number
div.out_mode self=tensor|number other=tensor|number
div_.Tensor other=tensor|number
div_.Tensor_mode other=tensor|number
elu.default alpha=number scale=absent input_scale=absent
empty.memory_format device=device
empty_permuted.default device=device
empty_quantized.default device=device
empty_strided.default device=device
eye.default device=device
eye.m device=device
fft_fftfreq.default device=device
fft_rfftfreq.default device=device
floor_divide.default self=tensor|number other=tensor|number
floor_divide.out self=tensor|number other=tensor|number
floor_divide_.Tensor other=tensor|number
full.default device=device
hamming_window.default device=device
hamming_window.periodic device=device
hamming_window.periodic_alpha device=device
hamming_window.periodic_alpha_beta device=device
hann_window.default device=device
hann_window.periodic device=device
index_put.default indices=empty|tensors
index_put_.default indices=empty|tensors
kaiser_window.beta device=device
kaiser_window.default device=device
kaiser_window.periodic device=device
linspace.Scalar_Tensor device=device
linspace.Tensor_Scalar device=device
linspace.Tensor_Tensor device=device
linspace.default device=device
logspace.Scalar_Tensor device=device
logspace.Tensor_Scalar device=device
logspace.Tensor_Tensor device=device
logspace.default device=device
mul.Tensor self=tensor|number other=tensor|number
mul.out self=tensor|number other=tensor|number
mul_.Tensor other=tensor|number
normal.float_float device=device
ones.default device=device
rand.default device=device
rand.generator device=device
randint.default dtype=absent|dtype device=device
randint.generator dtype=absent|dtype device=device
randint.low dtype=absent|dtype device=device
randint.low_generator dtype=absent|dtype device=device
randn.default device=device
randn.generator device=device
randperm.default dtype=absent|dtype device=device
randperm.generator dtype=absent|dtype device=device
scalar_tensor.default device=device
std.correction correction=none|number
std.correction_out correction=none|number
std_mean.correction correction=none|number
sub.Tensor self=tensor|number other=tensor|number
sub.out self=tensor|number other=tensor|number
sub_.Tensor other=tensor|number
tril_indices.default dtype=absent|dtype device=device
triu_indices.default dtype=absent|dtype device=device
var.correction correction=none|number
var.correction_out correction=none|number
var_mean.correction correction=none|number
zeros.default device=device
"""
"""Kinds of arguments, in place of those that the schema suggests: `argument=kind|kind`."""
