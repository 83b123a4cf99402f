//! What a donor is told, and why it may refuse.

use crate::extents::ledger::LedgerError;
use crate::extents::table::RestoreError;
use crate::pages::zones::ZoneError;
use crate::parking::park_file::{ParkConfig, ParkError};
use hecaton_memory::Size;
use hecaton_memory::memfd::MemoryError;
use hecaton_memory::meminfo::MEMINFO;
use hecaton_transport::server::Limits;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// What a donor lends, and where it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DonorConfig {
    /// The donor's name, one of its kind in the cluster; at most 64 bytes.
    pub name: String,
    /// Where it serves; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Most that it lends. Rounded down to whole pages, huge ones if those are used.
    pub lend: Size,
    /// Lends the memory of this NUMA node alone. Without it, that of all nodes.
    pub numa_node: Option<u32>,
    /// Lends huge pages of 2 MiB, which the host must have set aside. They are taken with the extent
    /// and not as written, and go back with the extent and not as discarded, because a write that
    /// finds no huge page ends the process. Extents are of 2 MiB or more.
    pub huge_pages: bool,
    /// The directory of its node's certificate: borrowers show one of theirs, and are spoken to by TLS.
    pub tls_dir: Option<PathBuf>,
    /// Most connections at a time.
    pub connections: usize,
    /// A borrower that does not take its answers is cut off after this long.
    pub stall: Duration,
    /// Lends less, and asks for some back, while the host has less than that available.
    pub keep_free: Option<Size>,
    /// Parks in a file what it is to give back and nobody can take.
    pub park: Option<ParkConfig>,
    /// Where the kernel says what the host has available.
    pub meminfo: PathBuf,
}

impl DonorConfig {
    /// A donor that lends base pages of all nodes.
    pub fn new(name: impl Into<String>, listen: SocketAddr, lend: Size) -> DonorConfig {
        let Limits { connections, stall, .. } = Limits::default();
        let name = name.into();
        let meminfo = MEMINFO.into();
        DonorConfig {
            name,
            listen,
            lend,
            numa_node: None,
            huge_pages: false,
            tls_dir: None,
            connections,
            stall,
            keep_free: None,
            park: None,
            meminfo,
        }
    }
}

/// Why a donor does not lend.
#[derive(Debug, thiserror::Error)]
pub enum DonorError {
    /// The name is empty or does not fit in a greeting.
    #[error("`{0}` is no name for a donor: it must have 1 to 64 bytes")]
    Name(String),
    /// Less than a page.
    #[error("{lend} is too little to lend: the least is {least}")]
    TooLittle {
        /// What was to be lent.
        lend: Size,
        /// A page of the kind that was asked for.
        least: Size,
    },
    /// More than there is.
    #[error("{lend} cannot be lent: this machine has {total} of memory")]
    TooMuch {
        /// What was to be lent.
        lend: Size,
        /// The machine's memory.
        total: Size,
    },
    /// The NUMA node does not have the memory.
    #[error(transparent)]
    Zone(#[from] ZoneError),
    /// The host's NUMA nodes cannot be found out.
    #[error("cannot read the host's NUMA nodes")]
    Topology(#[source] io::Error),
    /// The kernel does not bind the memory.
    #[error("cannot bind memory to NUMA node {node}; without a node named, memory of all is lent")]
    Bind {
        /// The node that was asked for.
        node: u32,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The memory to lend cannot be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The ledger cannot be made, or a predecessor's not be taken over.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// What stands in the predecessor's ledger cannot be.
    #[error("the ledger handed over is damaged")]
    Restore(#[from] RestoreError),
    /// What was handed over is another donor's.
    #[error("the memory handed over is for lending {held}, and {lend} is to be lent")]
    OtherSize {
        /// What was handed over.
        held: Size,
        /// What this donor is to lend.
        lend: Size,
    },
    /// Pages cannot be parked.
    #[error(transparent)]
    Park(#[from] ParkError),
    /// A predecessor parked, and this donor is not to.
    #[error("what was handed over is of a donor that parks pages, and this one is not to park any")]
    NotToPark,
    /// Not all of the descriptors were handed over.
    #[error("the descriptor `{0}` was not handed over with the others")]
    MissingFd(&'static str),
    /// The port is another program's.
    #[error("{0} is in use by another program: stop that one, or take another port (0 is any)")]
    PortInUse(SocketAddr),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A thread or a descriptor cannot be had.
    #[error("cannot start to serve")]
    Start(#[source] io::Error),
}
