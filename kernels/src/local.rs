//! The local communicator: ranks are threads of one process.
use crate::collective::Transport;
use std::sync::Arc;
use std::time::Duration;

/// An emulated link: one per rank and direction, shared by all its collectives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bytes per second in each direction.
    pub bytes_per_second: f64,
    /// Latency of one collective.
    pub latency: Duration,
}

/// What the ranks of one process share.
#[derive(Debug)]
pub struct LocalWorld {}

impl LocalWorld {
    /// A world of `ranks` ranks, with an emulated link if one is given.
    pub fn new(ranks: usize, link: Option<Link>) -> Arc<Self> {
        let _ = (ranks, link);
        unimplemented!()
    }
    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        unimplemented!()
    }
    /// The transport of one rank.
    pub fn transport(self: &Arc<Self>, rank: usize) -> LocalTransport {
        let _ = rank;
        unimplemented!()
    }
}

/// One rank's side of a [`LocalWorld`].
#[derive(Debug)]
pub struct LocalTransport {}

impl Transport for LocalTransport {
    fn rank(&self) -> usize {
        unimplemented!()
    }
    fn world(&self) -> usize {
        unimplemented!()
    }
    fn may_block(&self) -> bool {
        false
    }
    unsafe fn run(
        &self,
        _: &crate::Collective,
        _: &crate::collective::HostMemory,
    ) -> Result<crate::collective::Transfer, crate::CommError> {
        unimplemented!()
    }
    fn abort(&self, _: &crate::Cause) {}
}
