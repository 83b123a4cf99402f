//! A donor from its start to its end: opened on new memory or a predecessor's, serving, stopped.

use crate::config::{DonorConfig, DonorError};
use crate::extents::layout::Layout;
use crate::extents::ledger::{Ledger, Records};
use crate::extents::table::{Table, Zone};
use crate::host::HostWatch;
use crate::lender::Lender;
use crate::pages::zones;
use crate::parking::keeper::Keeper;
use crate::parking::park::{Park, parked_in};
use crate::parking::park_file::{ParkError, ParkFile};
use crate::server::PageService;
use crate::snapshot::Snapshot;
use crate::stop::StopHandle;
use hecaton_memory::arena::Arena;
use hecaton_memory::memfd::{Backing, HUGE_PAGE_BYTES};
use hecaton_memory::numa::NumaNode;
use hecaton_memory::words::SharedWords;
use hecaton_memory::{PAGE_SHIFT, PAGE_SIZE, Size, huge_pages, numa, pages_to_bytes, random_u64};
use hecaton_transport::protocol::MAX_NAME;
use hecaton_transport::server::{Limits, Server};
use hecaton_transport::tls::CredentialsDir;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tracing::{info, warn};

/// The label of the memory that is lent, among descriptors that a supervisor keeps.
pub const ARENA_LABEL: &str = "arena";

/// The label of the ledger, among descriptors that a supervisor keeps.
pub const LEDGER_LABEL: &str = "ledger";

/// The label of the file with the parked pages, among descriptors that a supervisor keeps.
pub const PARK_LABEL: &str = "park";

/// How often leases are looked at, what the host has left, and who gives back what is wanted back.
const LEASE_CHECK: Duration = Duration::from_secs(1);

/// The memory of a donor, which outlives its process in the hands of a supervisor.
#[derive(Debug)]
pub struct DonorFds {
    /// The memory that is lent.
    pub arena: OwnedFd,
    /// Records of the lending, and the pages' sums.
    pub ledger: OwnedFd,
    /// File with the parked pages, if the donor parks.
    pub park: Option<OwnedFd>,
}

impl DonorFds {
    /// Picks a donor's memory from descriptors under their labels, [`ARENA_LABEL`],
    /// [`LEDGER_LABEL`] and, if it parks, [`PARK_LABEL`]; others are dropped. None if neither of
    /// the first two is there.
    pub fn from_labelled(
        fds: impl IntoIterator<Item = (String, OwnedFd)>,
    ) -> Result<Option<DonorFds>, DonorError> {
        let (mut arena, mut ledger, mut park) = (None, None, None);
        for (label, fd) in fds {
            match label.as_str() {
                ARENA_LABEL => arena = Some(fd),
                LEDGER_LABEL => ledger = Some(fd),
                PARK_LABEL => park = Some(fd),
                _ => {}
            }
        }
        match (arena, ledger) {
            (Some(arena), Some(ledger)) => Ok(Some(DonorFds { arena, ledger, park })),
            (None, None) => Ok(None),
            (None, Some(_)) => Err(DonorError::MissingFd(ARENA_LABEL)),
            (Some(_), None) => Err(DonorError::MissingFd(LEDGER_LABEL)),
        }
    }

    /// All of them, each with its label.
    pub fn labelled(&self) -> impl Iterator<Item = (&'static str, BorrowedFd<'_>)> {
        let always = [(ARENA_LABEL, self.arena.as_fd()), (LEDGER_LABEL, self.ledger.as_fd())];
        always.into_iter().chain(self.park.as_ref().map(|park| (PARK_LABEL, park.as_fd())))
    }
}

/// A donor that has its memory, and may serve it. Clones are the same one.
#[derive(Clone)]
pub struct Donor {
    lender: Arc<Lender>,
    ledger: Arc<SharedWords>,
    limits: Limits,
    credentials: Option<Arc<CredentialsDir>>,
    keep_free: Option<Size>,
    meminfo: PathBuf,
}

impl Donor {
    /// Takes memory to lend: new memory, or that of a predecessor with everything that stood in it.
    /// In the second case the donor's life goes on, and borrowers need not notice.
    pub fn open(config: &DonorConfig, adopted: Option<DonorFds>) -> Result<Donor, DonorError> {
        if config.name.is_empty() || config.name.len() > MAX_NAME {
            return Err(DonorError::Name(config.name.clone()));
        }
        let backing = match config.huge_pages {
            true => Backing::HugePages,
            false => Backing::BasePages,
        };
        let pages = pages_to_lend(config.lend, backing)?;
        match adopted {
            Some(fds) => Donor::adopt(config, pages, fds),
            None => Donor::create(config, pages, backing),
        }
    }

    fn create(config: &DonorConfig, pages: u64, backing: Backing) -> Result<Donor, DonorError> {
        let nodes = host_nodes()?;
        let zones = zones::plan(pages, &nodes, config.numa_node)?;
        if config.huge_pages && config.numa_node.is_some() {
            huge_pages::check(pages_to_bytes(pages), config.numa_node)?;
        }
        let arena = Arena::create(&format!("hecaton-{}", config.name), pages, backing)?;
        let zones = bind(&arena, zones, config.numa_node)?;
        let min_order = match backing {
            Backing::BasePages => 0,
            Backing::HugePages => HUGE_PAGE_BYTES.ilog2() as u8 - PAGE_SHIFT as u8,
        };
        let layout = Layout::new(pages, min_order);
        let name = format!("hecaton-{}-ledger", config.name);
        let ledger = Ledger::create(&name, layout, &zones, random_u64())?;
        let table = Table::new(&zones, layout.limits);
        let park = Donor::new_park(config, &ledger)?;
        Ok(Donor::assemble(config, arena, table, ledger, park))
    }

    fn new_park(config: &DonorConfig, ledger: &Ledger) -> Result<Option<Park>, DonorError> {
        let Some(park) = &config.park else { return Ok(None) };
        if config.huge_pages {
            return Err(ParkError::HugePages.into());
        }
        let layout = ledger.layout();
        let file = ParkFile::create(park, layout.pages)?;
        Ok(Some(Park::new(file, park.into(), ledger.words().clone(), layout)))
    }

    fn adopt(config: &DonorConfig, pages: u64, fds: DonorFds) -> Result<Donor, DonorError> {
        let (ledger, Records { zones, next, spaces, extents }) = Ledger::adopt(fds.ledger)?;
        let arena = Arena::from_fd(fds.arena)?;
        if arena.pages() != pages || ledger.layout().pages != pages {
            let held = Size(pages_to_bytes(arena.pages()));
            return Err(DonorError::OtherSize { held, lend: config.lend });
        }
        let limits = ledger.layout().limits;
        let table = Table::restore(&zones, limits, next, spaces, extents, 0)?;
        let extents = table.extents().count();
        let layout = ledger.layout();
        let park = match fds.park {
            Some(fd) => {
                let park = config.park.as_ref().ok_or(DonorError::NotToPark)?;
                Some(Park::adopt(fd, park.into(), ledger.words().clone(), layout)?)
            }
            None if parked_in(ledger.words(), layout).count(0..pages) > 0 => {
                return Err(DonorError::MissingFd(PARK_LABEL));
            }
            None => Donor::new_park(config, &ledger)?,
        };
        let donor = Donor::assemble(config, arena, table, ledger, park);
        donor.lender.empty_what_is_of_no_use();
        info!(donor = config.name, extents, "took over the memory of the process before");
        Ok(donor)
    }

    fn assemble(
        config: &DonorConfig,
        arena: Arena,
        table: Table,
        ledger: Ledger,
        park: Option<Park>,
    ) -> Donor {
        let words = ledger.words().clone();
        let lender = Arc::new(Lender::new(config.name.clone(), arena, table, ledger, park));
        let (keep_free, meminfo) = (config.keep_free, config.meminfo.clone());
        let tls_dir = config.tls_dir.clone();
        let (connections, stall) = (config.connections, config.stall);
        let limits = Limits { connections, stall, ..Limits::default() };
        let credentials = tls_dir.map(CredentialsDir::new).map(Arc::new);
        Donor { lender, ledger: words, limits, credentials, keep_free, meminfo }
    }

    /// Duplicates of the descriptors of the donor's memory, to be kept by a supervisor.
    pub fn fds(&self) -> io::Result<DonorFds> {
        Ok(DonorFds {
            arena: self.lender.arena().as_fd().try_clone_to_owned()?,
            ledger: self.ledger.as_fd().try_clone_to_owned()?,
            park: self
                .lender
                .parks_in()
                .map(|park| park.file.as_fd().try_clone_to_owned())
                .transpose()?,
        })
    }

    /// Serves the connections that come to `listener`.
    pub fn serve(&self, listener: TcpListener) -> Result<Serving, DonorError> {
        let watch = |keep_free| HostWatch::new(self.meminfo.clone(), keep_free, &self.lender);
        let mut host = self.keep_free.map(watch);
        // Before anything is lent.
        host.iter_mut().for_each(|host| host.look(&self.lender));
        let credentials = self.credentials.clone();
        let service = Arc::new(PageService::new(self.lender.clone(), credentials.clone()));
        let server = Server::start(listener, service, self.limits, credentials);
        let server = server.map_err(DonorError::Start)?;
        let stop = StopHandle::default();
        let leases = thread::Builder::new().name("donor-leases".into()).spawn({
            let (lender, stop) = (self.lender.clone(), stop.clone());
            move || {
                while !stop.wait_for(LEASE_CHECK) {
                    lender.expire_leases();
                    host.iter_mut().for_each(|host| host.look(&lender));
                    lender.review_recalls();
                }
            }
        });
        let leases = leases.map_err(DonorError::Start)?;
        let keeper = thread::Builder::new().name("donor-keeper".into()).spawn({
            let (lender, stop) = (self.lender.clone(), stop.clone());
            move || {
                if let Some(park) = lender.parks_in() {
                    Keeper::new(&lender, park).run(&stop);
                }
            }
        });
        let keeper = keeper.map_err(DonorError::Start)?;
        let address = server.address();
        info!(donor = self.lender.name(), %address, pages = self.lender.arena().pages(), "lending");
        Ok(Serving { address, server: Some(server), threads: vec![leases, keeper], stop })
    }

    /// Lends nothing more, and tells borrowers to take away what they have here; or lends again.
    pub fn set_draining(&self, draining: bool) {
        self.lender.set_draining(draining);
    }

    /// Lends no more than that from now on, and asks borrowers to take away what is above it;
    /// without a limit, lends again what it was opened with.
    pub fn set_limit(&self, limit: Option<Size>) {
        self.lender.set_limit(limit);
    }

    /// Locks the lent memory and the ledger against being swapped out. Pages in swap are brought in
    /// first, which takes as long as the swap does. Memory that cannot be locked is skipped, and
    /// the first error returned.
    pub fn lock_memory(&self) -> io::Result<()> {
        let ledger = self.ledger.lock();
        ledger.and(self.lender.arena().lock())
    }

    /// The donor at this moment.
    pub fn snapshot(&self) -> Snapshot {
        self.lender.snapshot()
    }
}

/// A donor that serves. Dropping it stops that; the memory stays with the [`Donor`].
pub struct Serving {
    address: SocketAddr,
    server: Option<Server>,
    threads: Vec<JoinHandle<()>>,
    stop: StopHandle,
}

impl Serving {
    /// Where it serves.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends all connections, and returns when nothing is in service any more.
    pub fn stop(self) {}
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.stop();
        drop(self.server.take());
        for thread in self.threads.drain(..) {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                warn!(name, "a thread of the donor had panicked");
            }
        }
    }
}

/// Whether the host has the NUMA node and, on it, as much memory as donors are to lend together.
pub fn check_numa_node(node: u32, wanted_bytes: u64) -> Result<(), DonorError> {
    Ok(zones::check_node(node, Size(wanted_bytes), &host_nodes()?)?)
}

fn host_nodes() -> Result<Vec<NumaNode>, DonorError> {
    numa::nodes(Path::new(numa::SYSFS_NODES)).map_err(DonorError::Topology)
}

/// Listens on an address; the error tells a port in use from the rest.
pub fn listen(address: SocketAddr) -> Result<TcpListener, DonorError> {
    TcpListener::bind(address).map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => DonorError::PortInUse(address),
        _ => DonorError::Listen { address, source },
    })
}

/// Lends new memory until told to stop. `ready` is called with the address when requests are
/// served.
pub fn run(
    config: &DonorConfig,
    stop: &StopHandle,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), DonorError> {
    let listener = listen(config.listen)?;
    let serving = Donor::open(config, None)?.serve(listener)?;
    ready(serving.address());
    stop.wait();
    serving.stop();
    Ok(())
}

fn pages_to_lend(lend: Size, backing: Backing) -> Result<u64, DonorError> {
    let unit = match backing {
        Backing::BasePages => PAGE_SIZE as u64,
        Backing::HugePages => HUGE_PAGE_BYTES,
    };
    if lend.0 < unit {
        return Err(DonorError::TooLittle { lend, least: Size(unit) });
    }
    let system = rustix::system::sysinfo();
    let total = Size(system.totalram as u64 * u64::from(system.mem_unit));
    if lend > total {
        return Err(DonorError::TooMuch { lend, total });
    }
    Ok(lend.0 / unit * unit / PAGE_SIZE as u64)
}

/// Binds each zone to its node. When nobody asked for a node and the kernel does not let us bind
/// (some containers), the zones stay without.
fn bind(arena: &Arena, zones: Vec<Zone>, chosen: Option<u32>) -> Result<Vec<Zone>, DonorError> {
    let mut first = 0;
    for zone in &zones {
        let pages = first..first + zone.pages;
        first = pages.end;
        let Some(node) = zone.node else { continue };
        match arena.bind(pages, node) {
            Ok(()) => {}
            Err(source) if chosen.is_some() => return Err(DonorError::Bind { node, source }),
            Err(error) => {
                warn!(%error, node, "memory is not bound to NUMA nodes");
                return Ok(vec![Zone { pages: arena.pages(), node: None }]);
            }
        }
    }
    Ok(zones)
}
