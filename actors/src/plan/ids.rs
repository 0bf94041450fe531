//! The numbers by which everything is called: newtypes, so that a bucket can't be taken for a parameter.
//!
//! Each one is an index into a list of the plan, except [`Version`], which counts finished steps.

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $word:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub $inner);

        impl $name {
            /// The number as an index into the list it belongs to.
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// The id with this index.
            pub const fn from_index(index: usize) -> Self {
                Self(index as $inner)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!($word, " {}"), self.0)
            }
        }
    };
}

id! {
    /// A parameter, numbered in registration order.
    ParamId(u32), "parameter"
}
id! {
    /// A unit, numbered over all chunks in forward order.
    UnitId(u32), "unit"
}
id! {
    /// A bucket, numbered over all buffers: buffer by buffer, then by offset.
    BucketId(u32), "bucket"
}
id! {
    /// A buffer of trainable parameters, numbered by chunk, then first registration.
    BufferIndex(u32), "buffer"
}
id! {
    /// A buffer of frozen parameters, numbered by chunk, then first registration.
    FrozenIndex(u32), "frozen buffer"
}
id! {
    /// A place in the gather order, from 0.
    Position(u32), "position"
}
id! {
    /// One worker of the job.
    Rank(usize), "rank"
}

/// How many finished steps (updated or skipped) the parameters reflect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version(pub u64);

impl Version {
    /// The version after one more step.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "version {}", self.0)
    }
}
