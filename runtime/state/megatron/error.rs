//! What can be wrong with a file of Megatron-LM, each naming the place in it and what to do.

/// What is wrong with a file of Megatron-LM's distributed optimizer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MegatronProblem {
    /// Not what `torch.save` writes, or damaged.
    #[error("is no file of torch.save: {reason}; give the `distrib_opt.pt` of a checkpoint, or copy it again")]
    NotTorch {
        /// What does not fit.
        reason: String,
    },
    /// Something in its pickle that no file of optimizer state has. Nothing of it was run.
    #[error(
        "has {what} at byte {at} of its pickle, and optimizer state has not: give the `distrib_opt.pt` of a checkpoint"
    )]
    Pickle {
        /// What it is.
        what: String,
        /// Where it is.
        at: usize,
    },
    /// Something is not where it belongs.
    #[error("{place}: {what}; give a `distrib_opt.pt` as Megatron-LM of November 2023 or before wrote it")]
    Content {
        /// Where in the file.
        place: String,
        /// What is wrong there.
        what: String,
    },
    /// Another number of elements, or of buckets, than the model has by what the caller said.
    #[error(
        "{place} has {found} {unit}, and {planned} by the model on {ranks} ranks with {}: give the number of \
         data-parallel ranks and the bucket size with which it was saved, and a model whose parameters are registered in the \
         order of its modules' parameters()",
        bucket_size.map_or("one bucket".into(), |numel| format!("bucket size {numel}"))
    )]
    Differs {
        /// Chunk, bucket and tensor in the file.
        place: String,
        /// `elements` or `buckets`.
        unit: &'static str,
        /// How many the file has.
        found: usize,
        /// How many the plan has.
        planned: usize,
        /// The number of data-parallel ranks.
        ranks: usize,
        /// The bucket size; `None`: one bucket.
        bucket_size: Option<usize>,
    },
}
