//! Why a volume cannot be, and why a request to one fails.

use crate::spilling::spill::SpillError;
use crate::volume::MAX_VOLUME_BYTES;
use hecaton_memory::memfd::MemoryError;
use hecaton_memory::{PAGE_SIZE, Size};
use hecaton_space::SpaceError;
use hecaton_space::lists::FetchError;
use rustix::io::Errno;
use std::io;

/// Why a volume cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// No volume has such a size.
    #[error(
        "a volume of {} cannot be: its size is a multiple of {PAGE_SIZE} bytes, up to {}",
        Size(*.0), Size(MAX_VOLUME_BYTES)
    )]
    Size(u64),
    /// The data that a predecessor left are not the tables of a volume.
    #[error("what was kept of the volume are not a volume's tables")]
    Broken,
    /// The pool cannot be used.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// The volume's tables cannot be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The spill file cannot be had.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// The system refuses a thread.
    #[error("cannot start a thread")]
    Thread(#[from] io::Error),
}

/// Why a volume keeps its size.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// No volume has the wanted size.
    #[error(transparent)]
    Size(#[from] VolumeError),
    /// Pages beyond the wanted end are in use.
    #[error(
        "{} beyond the new end are in use, the last of them at {}: discard them first (blkdiscard, \
         fstrim), or choose at least {} bytes",
        Size(*bytes), Size(*end), end
    )]
    InUse {
        /// Bytes in use beyond the wanted end.
        bytes: u64,
        /// Where the last page in use ends.
        end: u64,
    },
    /// A request beyond the wanted end is not over.
    #[error(
        "a write beyond the new end waits for a donor that is away, or is in the write buffer; try again \
         when the volume has no unsettled writes"
    )]
    Stuck,
}

/// Why there is no snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// One is being made.
    #[error("another snapshot of it is being made; try again when that one is there")]
    Another,
    /// The copy cannot be begun.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// Something could not be read, or not be kept. Clients have not noticed.
    #[error("the copy could not be made: {0}")]
    Copy(#[from] BlockError),
}

/// Why a request to a volume failed. None of these ever comes with wrong data.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// Bytes beyond the volume's end.
    #[error("{bytes} bytes at {offset} reach beyond the volume's end")]
    Beyond {
        /// Where the request begins.
        offset: u64,
        /// How long it is.
        bytes: u64,
    },
    /// The pool is full.
    #[error(transparent)]
    NoRoom(SpaceError),
    /// A page whose last write did not end well: its contents are not known.
    #[error("page {0} could not be kept: write it again")]
    Unkept(u64),
    /// A write of these pages waits for a donor that is away.
    #[error("a write of the same pages still waits for a donor that is away")]
    Stuck,
    /// Writes that were buffered, and answered, are not with the donors.
    #[error("writes that were answered from the buffer are not with the donors, or were given up")]
    Unflushed,
    /// A page came damaged, or altered, again and again.
    #[error("page {0} is not what was written, in every copy, or twice in the only one")]
    Damaged(u64),
    /// The spill file cannot be used.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// The pool does not give, or take, the pages.
    #[error(transparent)]
    Pool(SpaceError),
    /// It is read here, and its tables are not known to be good.
    #[error("it cannot be read now: {0}")]
    Unheld(String),
    /// The volume is being deleted, or has been taken over.
    #[error("the volume is served no longer")]
    Over,
}

impl BlockError {
    /// Error number for this host's kernel.
    pub(crate) fn errno(&self) -> Errno {
        match self {
            BlockError::Beyond { .. } => Errno::INVAL,
            BlockError::NoRoom(_) => Errno::NOSPC,
            BlockError::Spill(error) if error.is_full() => Errno::NOSPC,
            BlockError::Spill(_)
            | BlockError::Unkept(_)
            | BlockError::Stuck
            | BlockError::Unflushed
            | BlockError::Damaged(_)
            | BlockError::Pool(_)
            | BlockError::Unheld(_)
            | BlockError::Over => Errno::IO,
        }
    }
}

impl From<FetchError> for BlockError {
    fn from(error: FetchError) -> BlockError {
        match error {
            FetchError::Damaged(page) => BlockError::Damaged(page),
            FetchError::Space(error) => error.into(),
        }
    }
}

impl From<SpaceError> for BlockError {
    fn from(error: SpaceError) -> BlockError {
        match error {
            SpaceError::NoRoom { .. } => BlockError::NoRoom(error),
            SpaceError::Fenced { .. } => BlockError::Over,
            error => BlockError::Pool(error),
        }
    }
}
