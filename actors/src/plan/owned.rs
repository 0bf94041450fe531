//! What a rank owns of a bucket: pieces of parameters, and the same pieces as kernels want them (SPEC L6, L7).
//!
//! Two binary searches and the pieces themselves: over all ranks and buckets at most parameters + d x buckets.

use gatherflow_kernels::norm::NormPiece;
use gatherflow_kernels::work::AdamSegment;

use super::Plan;
use super::cost;
use super::ids::{BucketId, ParamId, Rank};
use super::range::Range;

/// A piece of a parameter in a rank's shard of a bucket: the same elements in four coordinates (SPEC L7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedPiece {
    /// Which parameter.
    pub param: ParamId,
    /// In the buffer.
    pub in_buffer: Range,
    /// In the bucket.
    pub in_bucket: Range,
    /// In this rank's shard of the bucket.
    pub in_shard: Range,
    /// In the flattened parameter.
    pub in_param: Range,
}

impl Plan {
    /// The elements of the buffer that a rank owns of a bucket (SPEC L6). `rank` must be below [`Plan::ranks`].
    pub fn shard(&self, rank: Rank, bucket: BucketId) -> Range {
        let slot = self.slot(rank, bucket);
        let bucket = self.bucket(bucket);
        Range::new(0, bucket.shard_numel).normalize(bucket.range.start + slot * bucket.shard_numel)
    }

    /// The pieces of parameters that a rank owns of a bucket, by offset; none where its shard is all padding.
    pub fn owned(&self, rank: Rank, bucket: BucketId) -> Vec<OwnedPiece> {
        let shard = self.shard(rank, bucket);
        let bucket = self.bucket(bucket);
        let range_of = |param: &ParamId| self.param(*param).home.range();
        let first = bucket.params.partition_point(|p| range_of(p).end <= shard.start);
        let end = bucket.params.partition_point(|p| range_of(p).start < shard.end);
        let pieces = bucket.params.get(first..end).unwrap_or_default().iter();
        pieces
            .filter_map(|&param| {
                cost::tick();
                let whole = range_of(&param);
                let in_buffer = whole.intersection(shard)?;
                Some(OwnedPiece {
                    param,
                    in_buffer,
                    in_bucket: in_buffer.normalize(in_buffer.start - bucket.range.start),
                    in_shard: in_buffer.normalize(in_buffer.start - shard.start),
                    in_param: in_buffer.normalize(in_buffer.start - whole.start),
                })
            })
            .collect()
    }

    /// All parameters of a bucket, by offset from its start.
    pub fn bucket_pieces(&self, bucket: BucketId) -> Vec<NormPiece> {
        let bucket = self.bucket(bucket);
        let piece = |id: &ParamId| {
            let param = self.param(*id);
            let range = param.home.range().normalize(param.home.range().start - bucket.range.start);
            NormPiece { start: range.start, end: range.end, param: id.0, counted: true }
        };
        bucket.params.iter().map(piece).collect()
    }

    /// The same pieces for the norm, which counts each logical element once over all ranks ([`Plan::counts`]).
    pub fn norm_pieces(&self, rank: Rank, bucket: BucketId) -> Vec<NormPiece> {
        let pieces = self.owned(rank, bucket).into_iter();
        pieces
            .map(|piece| NormPiece {
                start: piece.in_shard.start,
                end: piece.in_shard.end,
                param: piece.param.0,
                counted: self.counts(rank, self.param(piece.param)),
            })
            .collect()
    }

    /// The same pieces for Adam: runs of one group, over the gaps between them. Gaps are zero in gradient, master and
    /// moments, and with eps > 0 Adam leaves them so.
    pub fn adam_segments(&self, rank: Rank, bucket: BucketId) -> Vec<AdamSegment> {
        let mut segments: Vec<AdamSegment> = Vec::new();
        for piece in self.owned(rank, bucket) {
            let Range { start, end } = piece.in_shard;
            let group = self.param(piece.param).group;
            match segments.last_mut() {
                Some(last) if last.group == group => last.end = end,
                _ => segments.push(AdamSegment { start, end, group }),
            }
        }
        segments
    }
}
