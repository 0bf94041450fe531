//! The ranks of a job. So far they are threads of one process.

use crate::actors::{self, Link};
use crate::config::Config;
use crate::error::{Error, ErrorKind};

/// One rank's place in the job. Hand each thread its own; an [`Engine`](crate::Engine) takes it.
#[derive(Debug)]
pub struct Rank {
    pub(crate) seat: actors::Seat,
    pub(crate) link: Option<Link>,
}

impl Rank {
    /// Its number, from 0.
    pub fn rank(&self) -> usize {
        self.seat.rank()
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.seat.ranks()
    }
}

/// Makes ranks.
#[derive(Debug)]
pub struct Ranks;

impl Ranks {
    /// So many ranks as threads of this process.
    ///
    /// # Errors
    /// No ranks at all, or more than a process has threads for.
    pub fn local(ranks: usize) -> Result<Vec<Rank>, Error> {
        Self::local_with(ranks, None)
    }

    /// So many ranks over an emulated link.
    ///
    /// # Errors
    /// No ranks at all, more than a process has threads for, or a link without bandwidth.
    pub fn local_with(ranks: usize, link: Option<Link>) -> Result<Vec<Rank>, Error> {
        let seats = actors::Ranks::local(ranks, link).map_err(|e| Error::new(ErrorKind::Misuse, e.to_string()))?;
        Ok(seats.into_iter().map(|seat| Rank { seat, link }).collect())
    }

    /// So many ranks over the link that the configuration emulates, if it does.
    ///
    /// # Errors
    /// As [`Ranks::local_with`].
    pub fn with_config(ranks: usize, config: &Config) -> Result<Vec<Rank>, Error> {
        Self::local_with(ranks, config.link())
    }
}
