#id = affine_map<(d0) -> (d0)>
func.func @main(%x: tensor<64xf32>, %y: tensor<64xf32>) -> tensor<128xf32> {
  %e = tensor.empty() : tensor<64xf32>
  %pair:2 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel"]} ins(%x : tensor<64xf32>) outs(%e, %e : tensor<64xf32>, tensor<64xf32>) {
  ^bb0(%in: f32, %o1: f32, %o2: f32):
    %s = arith.mulf %in, %in : f32
    %t = arith.addf %in, %in : f32
    linalg.yield %s, %t : f32, f32
  } -> (tensor<64xf32>, tensor<64xf32>)
  %e2 = tensor.empty() : tensor<128xf32>
  %p0 = tensor.insert_slice %pair#0 into %e2[0] [64] [1] : tensor<64xf32> into tensor<128xf32>
  %p = tensor.insert_slice %pair#1 into %p0[64] [64] [1] : tensor<64xf32> into tensor<128xf32>
  %q0 = tensor.insert_slice %y into %e2[0] [64] [1] : tensor<64xf32> into tensor<128xf32>
  %q = tensor.insert_slice %y into %q0[64] [64] [1] : tensor<64xf32> into tensor<128xf32>
  %r = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel"]} ins(%p, %q : tensor<128xf32>, tensor<128xf32>) outs(%e2 : tensor<128xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %s = arith.subf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<128xf32>
  return %r : tensor<128xf32>
}
