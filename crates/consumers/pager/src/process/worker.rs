//! The process that pages: sets up the threads, and ends when the consumer has.

use crate::config::{Guest, PagerConfig};
use crate::core::{Core, OnLoss};
use crate::error::PagerError;
use crate::evict::{Evictor, give_back};
use crate::guest;
use crate::pool::cold::{CodeRecord, coded_stripes};
use crate::pool::placement::Placement;
use crate::pool::scrub;
use crate::process::admission;
use crate::process::adoption::AdoptionSocket;
use crate::process::channel::Receiver;
use crate::process::control;
use crate::process::guard::{self, Guard};
use crate::process::housekeeping::{self, Pool};
use crate::process::lifeline::Lifeline;
use crate::process::node::{NodeDirectory, NodeLine};
use crate::process::sigterm;
use crate::programs::fork;
use crate::serve::Server;
use crate::shared::Shared;
use crate::state::sealing::Sealing;
use crate::state::{Flag, State};
use hecaton_memory::{Epoch, SpaceId, pages_for_bytes};
use hecaton_space::{Redundancy, Space, SpaceConfig};
use hecaton_transport::tls::CredentialsDir;
use hecaton_uffd::handover::Door;
use std::os::fd::{BorrowedFd, FromRawFd, RawFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Descriptors that the first pager of a consumer opened, and each further one gets from the node.
/// They stay open as long as the process lives.
#[derive(Clone, Copy)]
pub(crate) struct Held {
    pub(crate) state: RawFd,
    pub(crate) listener: RawFd,
    /// Where programs attach that show the consumer's key.
    pub(crate) public: Option<RawFd>,
    pub(crate) control: RawFd,
    /// Where Firecracker connects, if it is to.
    pub(crate) firecracker: Option<RawFd>,
    /// A program ran on memory whose userfaultfd is gone: see [`crate::process::adopt`].
    pub(crate) lost: bool,
}

impl Held {
    /// All of them, with the labels under which the node holds them.
    pub(crate) fn labelled(&self) -> Vec<(String, RawFd)> {
        let firecracker = self.firecracker.map(|fd| (guard::FIRECRACKER, fd));
        let public = self.public.map(|fd| (guard::PUBLIC, fd));
        [
            (guard::STATE, self.state),
            (guard::LISTENER, self.listener),
            (guard::CONTROL, self.control),
        ]
        .into_iter()
        .chain(firecracker)
        .chain(public)
        .map(|(label, fd)| (label.to_owned(), fd))
        .collect()
    }
}

/// The ways from and to the node.
pub(crate) struct NodeWays {
    /// Up.
    pub(crate) guard: Arc<Guard>,
    /// Down.
    pub(crate) receiver: Receiver,
    /// Where another node finds the pager, if it is to be found.
    pub(crate) adoption: Option<AdoptionSocket>,
}

/// Pages until no process is left.
pub(crate) fn run(config: &PagerConfig, held: Held, node: NodeWays) -> Result<(), PagerError> {
    end_on_panic();
    // SAFETY: it is never closed.
    let (state, is_successor) = State::open(unsafe { BorrowedFd::borrow_raw(held.state) })?;
    // Each life of the pager has an epoch of its own: what a predecessor still has in the network
    // is refused, and cannot come after what this one writes.
    let lives = if is_successor { state.count_restart() } else { 0 };
    let mut space_config = SpaceConfig::new(
        SpaceId(config.space),
        Epoch(1 + lives),
        &config.consumer,
        crate::state::SPACE_PAGES,
    );
    space_config.segment_order = crate::state::SEGMENT_ORDER;
    space_config.redundancy = Redundancy::of_copies(config.placement.copies)?;
    space_config.cold = config.cold;
    space_config.site = config.site.clone();
    space_config.credentials = config.tls_dir.clone().map(CredentialsDir::new).map(Arc::new);
    space_config.lease = config.lease;
    let longest = longest_silence(config.lease);
    let connection = &mut space_config.connection;
    for limit in [&mut connection.connect, &mut connection.answer, &mut connection.stall] {
        *limit = longest.min(*limit);
    }
    space_config.failover = config.failover;
    space_config.give_up = config.donor_patience;
    space_config.patience = space_config.patience.min(config.donor_patience);
    let told = Arc::new(Mutex::new(config.clone()));
    let directory = Arc::new(NodeDirectory::new(Arc::clone(&told)));

    let sealing = config.encrypt.then(|| Sealing::new(state.seals));
    let mut core = Core::new(state, node.guard, pages_for_bytes(config.local_bytes));
    core.stats.encrypted = config.encrypt;
    if config.guest.is_some() {
        core.on_loss = OnLoss::Report;
    }
    let was_detaching = core.state.is(Flag::Detaching);
    if is_successor {
        core.load_spaces();
    }
    if held.lost {
        core.fail(LOST.into());
    }
    let space = if is_successor {
        let stored = core.stored_segments();
        let segments = stored.keys().copied();
        let coded = config.cold.map(|cold| coded_stripes(core.state.codes, cold.code, segments));
        Space::adopt_coded(space_config, directory, &stored, &coded.unwrap_or_default())?
    } else {
        Space::create(space_config, directory)?
    };
    config.placement.apply(&space, &Placement::default());
    let shared = Arc::new(Shared::new(core, sealing)?);
    let mut server = Server::new(shared.clone(), &space, held.listener)?;
    if let Some((listener, door)) = held.public.zip(Door::of(config.key.as_bytes())) {
        let shared = shared.clone();
        admission::begin(listener, door.key, move |program| shared.admit(program))?;
    }
    let image = match &config.guest {
        Some(Guest::Firecracker { image, .. }) => Some(image.clone()),
        _ => None,
    };
    if let (Some(image), Some(listener)) = (&image, held.firecracker) {
        server.expect_firecracker(listener, guest::image::image_bytes(image)?);
    }
    let image = image.filter(|_| !shared.lock().state.is(Flag::ImageLoaded));
    let mut evictor = Evictor::new(shared.clone(), &space)?;
    if is_successor {
        server.finish_journal();
        server.settle_helpers();
        let mut core = shared.lock();
        let unwritten = core.reconcile();
        core.stats.restarts = lives;
        core.lift_limit();
        if was_detaching {
            // There was room when it began. The machine may have gone meanwhile.
            shared.detaching.store(core.begin_detach(u64::MAX).is_ok(), Relaxed);
        }
        drop(core);
        evictor.resume(unwritten);
        server.watch_all();
        fork::take_over(&mut server, &shared);
    }

    sigterm::end_by_it();
    let evicting = spawn("evictor", move || evictor.run(image.as_deref()));
    let (giver, its_space) = (shared.clone(), space.clone());
    let giving_back = spawn("give-back", move || give_back::run(&giver, &its_space));
    // SAFETY: nobody else uses the number.
    let control = unsafe { UnixListener::from_raw_fd(held.control) };
    control.set_nonblocking(true)?;
    let (housekeepers, line) = (shared.clone(), NodeLine::new(config));
    let (records, codes) = {
        let core = shared.lock();
        (core.state.records, core.state.codes)
    };
    space.code_what_is_cold(Box::new(CodeRecord { codes, records }));
    if config.placement.copies > 1 {
        let scrubbed = space.clone();
        let bytes_per_s = config.scrub_bytes_per_s;
        let known = |page| scrub::stored(records, page);
        spawn("scrub", move || scrubbed.keep_scrubbed(&known, bytes_per_s, &|| false));
    }
    let copying_bytes_per_s = config.copying_bytes_per_s;
    let config = told;
    let pool = Pool { space: space.clone(), config: config.clone() };
    let last_look = pool.clone();
    let (controlled, its_pool) = (shared.clone(), pool.clone());
    spawn("control", move || control::serve(&control, &controlled, &its_pool));
    spawn("housekeeping", move || housekeeping::run(housekeepers, pool, line));

    let (renewed, tended) = (space.clone(), space.clone());
    spawn("leases", move || renewed.keep_leases(&|| false));
    spawn("upkeep", move || tended.keep_copies(copying_bytes_per_s, &|| false));

    let launch_over = Arc::new(AtomicBool::new(false));
    let lifeline = Lifeline {
        shared: shared.clone(),
        config,
        own: held,
        launch_over: launch_over.clone(),
        adoption: node.adoption,
    };
    spawn("node", move || lifeline.run(node.receiver));
    server.run(|core| {
        let no_more = launch_over.load(Relaxed) || core.failed.is_some();
        no_more && core.fork_requests.is_empty() && core.live_spaces().next().is_none()
    })?;
    shared.lock().over = true;
    shared.evict.notify_one();
    shared.give_back.notify_one();
    // Neither a write nor a discard must meet the release of all pages.
    for thread in [evicting, giving_back] {
        if thread.join().is_err() {
            unreachable!("a thread that panics ends the process");
        }
    }
    let stats = last_look.stats(&shared);
    let released = space.release();
    last_look.node_line().report(&stats);
    if let Some(error) = stats.error {
        return Err(PagerError::ConsumerEnded(error));
    }
    released.map_err(PagerError::from)
}

/// How long a connection may be silent at most, for a renewal not to wait for one donor until the
/// lease at the others has run out. It waits for an answer, a new connection, and two answers on
/// that.
fn longest_silence(lease: Duration) -> Duration {
    lease / 8
}

/// Why a consumer is ended whose programs cannot be given back their memory.
const LOST: &str = "its pager was killed after the node had stopped holding what belongs to it: the \
                    program's memory is out of reach";

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let thread = std::thread::Builder::new().name(name.into()).spawn(body);
    thread.expect("the system has a thread for the pager")
}

/// The exit status of a pager one of whose threads panicked: as good as killed.
pub const PANICKED: i32 = 101;

/// A thread that panics leaves its part undone: the process ends, and a successor does it anew.
pub fn end_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(PANICKED);
    }));
}
