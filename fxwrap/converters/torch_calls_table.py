"""Public spellings of ATen overloads, in the format of `torch_calls.py`.

Made on torch 2.13.0 by `python -m benchmarks.make_torch_calls_table`; do not edit by hand.
"""

SAME_NAME = {
    "method": """
abs_.default acos_.default acosh_.default add_.Tensor addbmm_.default addcdiv_.default addcmul_.default addmm_.default
addmv_.default addr_.default as_strided_.default asin_.default asinh_.default atan2_.default atan_.default
atanh_.default baddbmm_.default bernoulli_.Tensor|float bitwise_and_.Scalar|Tensor
bitwise_left_shift_.Tensor|Tensor_Scalar bitwise_not_.default bitwise_or_.Scalar|Tensor
bitwise_right_shift_.Tensor|Tensor_Scalar bitwise_xor_.Scalar|Tensor cauchy_.default ceil_.default
clamp_.Tensor|default clamp_max_.Tensor|default clamp_min_.Tensor|default conj_physical_.default copy_.default
copysign_.Scalar|Tensor cos_.default cosh_.default cumprod_.default cumsum_.default deg2rad_.default dense_dim.default
digamma_.default div_.Tensor|Tensor_mode eq_.Scalar|Tensor erf_.default erfc_.default erfinv_.default exp2_.default
exp_.default expand.default expm1_.default exponential_.default fill_.Scalar|Tensor floor_.default
floor_divide_.Tensor fmod_.Scalar|Tensor frac_.default gcd_.default ge_.Scalar|Tensor geometric_.default
gt_.Scalar|Tensor heaviside_.default hypot_.default i0_.default igamma_.default igammac_.default index_add_.default
index_copy_.default index_fill_.int_Scalar|int_Tensor index_put_.default index_reduce_.default is_coalesced.default
is_pinned.default is_set_to.default lcm_.default ldexp_.default le_.Scalar|Tensor lerp_.Scalar|Tensor lgamma_.default
log10_.default log1p_.default log2_.default log_.default log_normal_.default logical_and_.default logical_not_.default
logical_or_.default logical_xor_.default logit_.default lt_.Scalar|Tensor masked_fill_.Scalar|Tensor
masked_scatter_.default mul_.Tensor mvlgamma_.default nan_to_num_.default ne_.Scalar|Tensor neg_.default
new_empty.default new_empty_strided.default new_full.default new_ones.default new_zeros.default nextafter_.default
normal_.default polygamma_.default pow_.Scalar|Tensor put_.default rad2deg_.default random_.default|from|to
reciprocal_.default relu_.default remainder_.Scalar|Tensor renorm_.default repeat.default resize_.default
resize_as_.default resize_as_sparse_.default round_.decimals|default rsqrt_.default
scatter_.reduce|src|value|value_reduce scatter_add_.default scatter_reduce_.two set_.default sgn_.default
sigmoid_.default sign_.default sin_.default sinc_.default sinh_.default sparse_dim.default sparse_mask.default
sparse_resize_.default sparse_resize_and_clear_.default sqrt_.default squeeze_.default|dim|dims sub_.Tensor t_.default
tan_.default tanh_.default to_mkldnn.default to_padded_tensor.default transpose_.default tril_.default triu_.default
trunc_.default unfold.default uniform_.default unsqueeze_.default values.default view.default
xlogy_.Scalar_Other|Tensor zero_.default
""",
    "torch": """
abs.default|out acos.default|out acosh.default|out add.Tensor|out addbmm.default|out addcdiv.default|out
addcmul.default|out addmm.default|dtype|dtype_out|out addmv.default|out addr.default|out affine_grid_generator.default
alias_copy.default|out all.all_out|default|dim|dims|dims_out|out allclose.default amax.default|out amin.default|out
aminmax.default|out angle.default|out any.all_out|default|dim|dims|dims_out|out
arange.default|out|start|start_out|start_step argmax.default|out argmin.default|out as_strided.default
as_strided_copy.default|out as_strided_scatter.default asin.default|out asinh.default|out atan.default|out
atan2.default|out atanh.default|out baddbmm.default|dtype|dtype_out|out bartlett_window.default|periodic
batch_norm_backward_elemt.default batch_norm_backward_reduce.default batch_norm_elemt.default|out
batch_norm_gather_stats.default batch_norm_gather_stats_with_counts.default batch_norm_stats.default
batch_norm_update_stats.default bernoulli.default|out|p binary_cross_entropy_with_logits.default bincount.default
binomial.default bitwise_and.Scalar|Scalar_Tensor|Scalar_out|Tensor|Tensor_out
bitwise_left_shift.Scalar_Tensor|Tensor|Tensor_Scalar|Tensor_Scalar_out|Tensor_out bitwise_not.default|out
bitwise_or.Scalar|Scalar_Tensor|Scalar_out|Tensor|Tensor_out
bitwise_right_shift.Scalar_Tensor|Tensor|Tensor_Scalar|Tensor_Scalar_out|Tensor_out
bitwise_xor.Scalar|Scalar_Tensor|Scalar_out|Tensor|Tensor_out blackman_window.default|periodic
bmm.default|dtype|dtype_out|out bucketize.Scalar|Tensor|Tensor_out cat.default|out ccol_indices_copy.default|out
ceil.default|out celu.default celu_.default channel_shuffle.default cholesky.default|out cholesky_inverse.default|out
cholesky_solve.default|out clamp.Tensor|Tensor_out|default|out clamp_max.Tensor|Tensor_out|default|out
clamp_min.Tensor|Tensor_out|default|out clone.default col_indices_copy.default|out complex.default|out
conj_physical.out constant_pad_nd.default conv_tbc.default convolution.default copysign.Scalar|Scalar_out|Tensor|out
cos.default|out cosh.default|out count_nonzero.default|dim_IntList crow_indices_copy.default|out
cudnn_affine_grid_generator.default cudnn_batch_norm.default|out cudnn_convolution.default|out
cudnn_convolution_add_relu.default cudnn_convolution_relu.default cudnn_convolution_transpose.default
cudnn_grid_sampler.default cummax.default|out cummin.default|out cumprod.default|out cumsum.default|out
deg2rad.default|out dequantize.self|tensors detach.default detach_copy.default|out diag_embed.default diagonal.default
diagonal_copy.default|out diagonal_scatter.default digamma.default|out dist.default
div.Tensor|Tensor_mode|out|out_mode dot.default|out embedding.default embedding_renorm_.default empty.memory_format
empty_like.default empty_permuted.default empty_quantized.default empty_strided.default
eq.Scalar|Scalar_out|Tensor|Tensor_out equal.default erf.default|out erfc.default|out erfinv.default|out
exp.default|out exp2.default|out expand_copy.default|out expm1.default|out eye.default|m|m_out|out fill.Scalar|Tensor
flip.default floor.default|out floor_divide.default|out fmax.default|out fmin.default|out
fmod.Scalar|Scalar_out|Tensor|Tensor_out frac.default|out frexp.Tensor|Tensor_out full.default|out full_like.default
gather.default|out gcd.default|out ge.Scalar|Scalar_out|Tensor|Tensor_out geqrf.a|default grid_sampler_2d.default
grid_sampler_3d.default gt.Scalar|Scalar_out|Tensor|Tensor_out
hamming_window.default|periodic|periodic_alpha|periodic_alpha_beta hann_window.default|periodic hardshrink.default|out
hash_tensor.default|out heaviside.default|out histc.default|out
histogram.bin_ct|bin_ct_out|bins_tensor|bins_tensor_out hspmm.default|out hypot.default|out i0.default|out
igamma.default|out igammac.default|out index_add.default|out index_copy.default|out index_fill.int_Scalar|int_Tensor
index_put.default index_reduce.default|out index_select.default|out indices_copy.default|out int_repr.default
is_same_size.default
isin.Scalar_Tensor|Scalar_Tensor_out|Tensor_Scalar|Tensor_Scalar_out|Tensor_Tensor|Tensor_Tensor_out isinf.default
isnan.default isneginf.default|out isposinf.default|out kaiser_window.beta|default|periodic kthvalue.default|values
lcm.default|out ldexp.Tensor|out le.Scalar|Scalar_out|Tensor|Tensor_out lerp.Scalar|Scalar_out|Tensor|Tensor_out
lgamma.default|out
linspace.Scalar_Tensor|Scalar_Tensor_out|Tensor_Scalar|Tensor_Scalar_out|Tensor_Tensor|Tensor_Tensor_out|default|out
log.default|out log10.default|out log1p.default|out log2.default|out log_softmax.int_out logaddexp.default|out
logaddexp2.default|out logcumsumexp.default|out logical_and.default|out logical_not.default|out logical_or.default|out
logical_xor.default|out logit.default|out
logspace.Scalar_Tensor|Scalar_Tensor_out|Tensor_Scalar|Tensor_Scalar_out|Tensor_Tensor|Tensor_Tensor_out|default|out
logsumexp.default|out lt.Scalar|Scalar_out|Tensor|Tensor_out lu_unpack.default|out masked_fill.Scalar|Tensor
masked_scatter.default masked_select.default|out max.default|dim|dim_max|unary_out maximum.default|out
mean.default|dim|dtype_out|out median.default|dim|dim_values min.default|dim|dim_min|unary_out minimum.default|out
miopen_batch_norm.default miopen_convolution.default miopen_convolution_add_relu.default
miopen_convolution_relu.default miopen_convolution_transpose.default miopen_ctc_loss.Tensor|default
miopen_depthwise_convolution.default miopen_rnn.default mkldnn_adaptive_avg_pool2d.default|out
mkldnn_convolution.default mkldnn_linear_backward_weights.default mkldnn_max_pool2d.default mkldnn_max_pool3d.default
mkldnn_rnn_layer.default mm.default|dtype|dtype_out|out mode.default|values mul.Tensor|out multinomial.default|out
mv.default|out mvlgamma.default|out nan_to_num.default|out nanmedian.default|dim|dim_values nansum.default|out
narrow_copy.default|out native_batch_norm.default|out native_dropout.default native_group_norm.default
native_layer_norm.default native_norm.ScalarOpt_dim_dtype|default ne.Scalar|Scalar_out|Tensor|Tensor_out
neg.default|out nextafter.default|out nonzero.default|out nonzero_static.default|out
normal.Tensor_Tensor|Tensor_Tensor_out|Tensor_float|Tensor_float_out|float_Tensor|float_Tensor_out|float_float|float_float_out
ones.default|out ones_like.default ormqr.default|out permute.default permute_copy.default|out pixel_shuffle.default
pixel_unshuffle.default poisson.default polar.default|out polygamma.default|out
pow.Scalar|Scalar_out|Tensor_Scalar|Tensor_Scalar_out|Tensor_Tensor|Tensor_Tensor_out prod.default|dim_int|int_out
put.default q_per_channel_axis.default q_per_channel_scales.default q_per_channel_zero_points.default q_scale.default
q_zero_point.default quantize_per_channel.default quantize_per_tensor.default|tensor_qparams|tensors
quantize_per_tensor_dynamic.default quantized_batch_norm.default quantized_max_pool1d.default
quantized_max_pool2d.default quantized_max_pool3d.default rad2deg.default|out rand.default|generator|out
rand_like.default|generator randint.default|generator|generator_out|low|low_generator|low_generator_out|low_out|out
randint_like.Tensor|Tensor_generator|default|generator|low_dtype|low_generator_dtype randn.default|generator
randn_like.default|generator randperm.default|generator|generator_out|out reciprocal.default|out relu.default
remainder.Scalar|Scalar_Tensor|Scalar_out|Tensor|Tensor_out renorm.default|out repeat_interleave.Tensor roll.default
rot90.default round.decimals|decimals_out|default|out row_indices_copy.default|out rsqrt.default|out
rsub.Scalar|Tensor scalar_tensor.default
scatter.reduce|reduce_out|src|src_out|value|value_out|value_reduce|value_reduce_out scatter_add.default|out
scatter_reduce.two|two_out searchsorted.Scalar|Scalar_out|Tensor|Tensor_out segment_reduce.default select.int
select_copy.int|int_out select_scatter.default sgn.default|out sigmoid.default|out sign.default|out
signbit.default|out sin.default|out sinc.default|out sinh.default|out slice_copy.Tensor|Tensor_out
slice_inverse.default slice_scatter.default|out softmax.int_out sort.default|stable|values|values_stable
split_copy.Tensor split_with_sizes.default split_with_sizes_copy.default sqrt.default|out squeeze.default|dim|dims
squeeze_copy.default|dim|dim_out|dims|dims_out|out sspaddmm.out stack.default|out std.correction|correction_out
std_mean.correction sub.Tensor|out sum.IntList_out|default|dim_IntList t.default t_copy.default|out take.default|out
tan.default|out tanh.default|out threshold.default|out threshold_.default topk.default|values trace.default
transpose.int transpose_copy.int|int_out triangular_solve.X|default tril.default|out tril_indices.default
triu.default|out triu_indices.default trunc.default|out unbind.int unbind_copy.int unfold_copy.default|out
unsafe_split.Tensor unsafe_split_with_sizes.default unsqueeze.default unsqueeze_copy.default|out
values_copy.default|out var.correction|correction_out var_mean.correction vdot.default|out view_as_complex.default
view_as_complex_copy.default|out view_as_real.default view_as_real_copy.default|out
view_copy.default|dtype|dtype_out|out where.self|self_out
xlogy.OutScalar_Other|OutScalar_Self|OutTensor|Scalar_Other|Scalar_Self|Tensor zeros.default|out zeros_like.default
""",
    "torch.nn.functional": """
avg_pool2d.default|out avg_pool3d.default|out elu.default elu_.default gelu.default|out hardsigmoid.default
hardswish.default hardtanh_.default leaky_relu.default leaky_relu_.default linear.out max_pool2d_with_indices.default
mish.default silu.default softplus.default|out softshrink.default|out
""",
    "torch.special": """
special_airy_ai.default|out special_bessel_j0.default|out special_bessel_j1.default|out special_bessel_y0.default|out
special_bessel_y1.default|out special_chebyshev_polynomial_t.default|n_scalar|n_scalar_out|out|x_scalar|x_scalar_out
special_chebyshev_polynomial_u.default|n_scalar|n_scalar_out|out|x_scalar|x_scalar_out
special_chebyshev_polynomial_v.default|n_scalar|n_scalar_out|out|x_scalar|x_scalar_out
special_chebyshev_polynomial_w.default|n_scalar|n_scalar_out|out|x_scalar|x_scalar_out special_entr.default|out
special_erfcx.default|out special_hermite_polynomial_h.default|n_scalar|n_scalar_out|out|x_scalar|x_scalar_out
special_hermite_polynomial_he.default|n_scalar|n_scalar_out|out|x_scalar|x_scalar_out special_i0e.default|out
special_i1.default|out special_i1e.default|out
special_laguerre_polynomial_l.default|n_scalar|n_scalar_out|out|x_scalar|x_scalar_out
special_legendre_polynomial_p.default|n_scalar|n_scalar_out|out|x_scalar|x_scalar_out special_log_ndtr.default|out
special_modified_bessel_i0.default|out special_modified_bessel_i1.default|out special_modified_bessel_k0.default|out
special_modified_bessel_k1.default|out special_ndtri.default|out special_scaled_modified_bessel_k0.default|out
special_scaled_modified_bessel_k1.default|out
special_shifted_chebyshev_polynomial_t.default|n_scalar|n_scalar_out|out|x_scalar|x_scalar_out
special_shifted_chebyshev_polynomial_u.default|n_scalar|n_scalar_out|out|x_scalar|x_scalar_out
special_shifted_chebyshev_polynomial_v.default|n_scalar|n_scalar_out|out|x_scalar|x_scalar_out
special_shifted_chebyshev_polynomial_w.default|n_scalar|n_scalar_out|out|x_scalar|x_scalar_out
special_spherical_bessel_j0.default|out
special_xlog1py.default|other_scalar|other_scalar_out|out|self_scalar|self_scalar_out
special_zeta.default|other_scalar|other_scalar_out|out|self_scalar|self_scalar_out
""",
    "torch.linalg": """
linalg_cholesky_ex.L|default linalg_cross.default|out linalg_eig.default|out linalg_eigvals.out
linalg_householder_product.default|out linalg_inv_ex.default|inverse linalg_ldl_factor_ex.default|out
linalg_ldl_solve.default|out linalg_lstsq.default|out linalg_lu.default|out linalg_lu_factor_ex.default|out
linalg_lu_solve.default|out linalg_matrix_exp.default linalg_pinv.atol_rtol_tensor|atol_rtol_tensor_out
linalg_qr.default|out linalg_solve_triangular.default|out linalg_vector_norm.default|out
""",
    "torch.fft": "fft_fftfreq.default|out fft_rfftfreq.default|out",
}
"""Overloads by namespace of the function of that name, or of the method: `op.overload|overload`."""

RENAMED = """
_log_softmax.default torch.log_softmax -half_to_float
_softmax.default torch.softmax -half_to_float
_to_copy.default .to +copy=True
"""
"""Overloads of another name: `-argument` is not written, `+text` is, "." starts a method."""

ACCEPTS = {
    "alpha=number scale=absent input_scale=absent": "elu.default",
    "correction=none|number": """
std.correction|correction_out std_mean.correction var.correction|correction_out var_mean.correction
""",
    "device=device": """
arange.default|start bartlett_window.default|periodic blackman_window.default|periodic empty.memory_format
empty_permuted.default empty_quantized.default empty_strided.default eye.default|m fft_fftfreq.default
fft_rfftfreq.default full.default hamming_window.default|periodic|periodic_alpha|periodic_alpha_beta
hann_window.default|periodic kaiser_window.beta|default|periodic
linspace.Scalar_Tensor|Tensor_Scalar|Tensor_Tensor|default logspace.Scalar_Tensor|Tensor_Scalar|Tensor_Tensor|default
normal.float_float ones.default rand.default|generator randn.default|generator scalar_tensor.default zeros.default
""",
    "dim=empty|ints|none": "all.dims|dims_out any.dims|dims_out",
    "dtype=absent|dtype device=device": """
randint.default|generator|low|low_generator randperm.default|generator tril_indices.default triu_indices.default
""",
    "dtype=dtype layout=absent pin_memory=absent": "_to_copy.default",
    "half_to_float=false": "_log_softmax.default _softmax.default",
    "indices=empty|tensors": "index_put.default index_put_.default",
    "min=number": "clamp.default|out clamp_.default",
    "other=tensor|number": "add_.Tensor div_.Tensor|Tensor_mode floor_divide_.Tensor mul_.Tensor sub_.Tensor",
    "reduction=int": "binary_cross_entropy_with_logits.default",
    "self=tensor|number other=tensor|number": """
add.Tensor|out div.Tensor|Tensor_mode|out|out_mode floor_divide.default|out mul.Tensor|out sub.Tensor|out
""",
    "src=tensor|number": "copy_.default",
    "step=number device=device": "arange.start_step",
}
"""Overloads by the kinds that override those of the schema types: `argument=kind|kind`."""
