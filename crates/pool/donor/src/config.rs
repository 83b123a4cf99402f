//! Defines a donor's configuration and the errors that stop its start.

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

/// Configuration of a donor: lent memory, address and limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DonorConfig {
    /// Name of the donor, unique in the cluster; 1 to 64 bytes.
    pub name: String,
    /// Address that the donor listens on; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Most memory that it lends, rounded down to whole pages: huge ones if those are used.
    pub lend: Size,
    /// Lends memory of this NUMA node only; `None` lends that of all nodes.
    pub numa_node: Option<u32>,
    /// Lends huge pages of 2 MiB, which the host must have reserved. An extent takes and returns
    /// all its pages at once, not on write and discard: a write that finds no huge page ends the
    /// process. Extents have at least 2 MiB.
    pub huge_pages: bool,
    /// Directory of the node's certificate. Borrowers must use TLS and show their own certificate.
    pub tls_dir: Option<PathBuf>,
    /// Most connections at a time.
    pub connections: usize,
    /// Timeout after which a borrower that does not take its answers is disconnected.
    pub stall: Duration,
    /// Lends less, and recalls memory, while the host has less than this available.
    pub keep_free: Option<Size>,
    /// Parks recalled pages in a file if no borrower gives them back.
    pub park: Option<ParkConfig>,
    /// Path of the kernel's report on the host's available memory.
    pub meminfo: PathBuf,
}

impl DonorConfig {
    /// Configures a donor that lends base pages of all nodes.
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

/// Error that keeps a donor from lending.
#[derive(Debug, thiserror::Error)]
pub enum DonorError {
    /// The name is empty or does not fit in a greeting.
    #[error("`{0}` is no name for a donor: it must have 1 to 64 bytes")]
    Name(String),
    /// The memory to lend is less than a page.
    #[error("{lend} is too little to lend: the least is {least}")]
    TooLittle {
        /// Memory to lend.
        lend: Size,
        /// A page of the requested kind.
        least: Size,
    },
    /// The memory to lend is more than the host has.
    #[error("{lend} cannot be lent: this machine has {total} of memory")]
    TooMuch {
        /// Memory to lend.
        lend: Size,
        /// Memory of the host.
        total: Size,
    },
    /// The NUMA node does not have the memory.
    #[error(transparent)]
    Zone(#[from] ZoneError),
    /// The host's NUMA nodes cannot be read.
    #[error("cannot read the host's NUMA nodes")]
    Topology(#[source] io::Error),
    /// The kernel refuses to bind the memory.
    #[error("cannot bind memory to NUMA node {node}; without a node named, memory of all is lent")]
    Bind {
        /// The requested node.
        node: u32,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
    /// The memory to lend cannot be obtained.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The ledger cannot be created, or a predecessor's cannot be taken over.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The records in the predecessor's ledger are contradictory.
    #[error("the ledger handed over is damaged")]
    Restore(#[from] RestoreError),
    /// The memory handed over is another donor's: its size differs.
    #[error("the memory handed over is for lending {held}, and {lend} is to be lent")]
    OtherSize {
        /// Size handed over.
        held: Size,
        /// Size that this donor must lend.
        lend: Size,
    },
    /// Pages cannot be parked.
    #[error(transparent)]
    Park(#[from] ParkError),
    /// The predecessor parked pages, and this donor must not.
    #[error("what was handed over is of a donor that parks pages, and this one is not to park any")]
    NotToPark,
    /// Not all of the descriptors were handed over.
    #[error("the descriptor `{0}` was not handed over with the others")]
    MissingFd(&'static str),
    /// Another program uses the port.
    #[error("{0} is in use by another program: stop that one, or take another port (0 is any)")]
    PortInUse(SocketAddr),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
    /// A thread or a descriptor cannot be created.
    #[error("cannot start to serve")]
    Start(#[source] io::Error),
}
