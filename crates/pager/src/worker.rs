//! The process that pages: sets up the threads, and ends when the consumer has.

use crate::PagerError;
use crate::adoption::AdoptionSocket;
use crate::channel::Receiver;
use crate::config::{Guest, PagerConfig};
use crate::core::{Core, OnLoss};
use crate::evict::Evictor;
use crate::fork;
use crate::give_back;
use crate::guard::{self, Guard};
use crate::guest;
use crate::housekeeping::{self, Pool};
use crate::lifeline::Lifeline;
use crate::node::{NodeDirectory, NodeLine};
use crate::placement::Placement;
use crate::scrub;
use crate::sealing::Sealing;
use crate::serve::Server;
use crate::shared::Shared;
use crate::state::{Flag, State};
use hecaton_memory::{Epoch, SpaceId, pages_for_bytes};
use hecaton_space::{Redundancy, Space, SpaceConfig};
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
    pub(crate) control: RawFd,
    /// Where Firecracker connects, if it is to.
    pub(crate) firecracker: Option<RawFd>,
    /// A program ran on memory whose userfaultfd is gone: see [`crate::adopt`].
    pub(crate) lost: bool,
}

impl Held {
    /// All of them, with the labels under which the node holds them.
    pub(crate) fn labelled(&self) -> Vec<(String, RawFd)> {
        let firecracker = self.firecracker.map(|fd| (guard::FIRECRACKER, fd));
        [
            (guard::STATE, self.state),
            (guard::LISTENER, self.listener),
            (guard::CONTROL, self.control),
        ]
        .into_iter()
        .chain(firecracker)
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
    space_config.site = config.site.clone();
    space_config.lease = config.lease;
    let longest = longest_silence(config.lease);
    let connection = &mut space_config.connection;
    for limit in [&mut connection.connect, &mut connection.answer, &mut connection.stall] {
        *limit = longest.min(*limit);
    }
    space_config.give_up = config.donor_patience;
    space_config.patience = space_config.patience.min(config.donor_patience);
    let directory = Arc::new(NodeDirectory::new(config));

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
        Space::adopt(space_config, directory, &core.stored_segments())?
    } else {
        Space::create(space_config, directory)?
    };
    config.placement.apply(&space, &Placement::default());
    let shared = Arc::new(Shared::new(core, sealing)?);
    let mut server = Server::new(shared.clone(), &space, held.listener)?;
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

    end_on_sigterm();
    let evicting = spawn("evictor", move || evictor.run(image.as_deref()));
    let (giver, its_space) = (shared.clone(), space.clone());
    let giving_back = spawn("give-back", move || give_back::run(&giver, &its_space));
    // SAFETY: nobody else uses the number.
    let control = unsafe { UnixListener::from_raw_fd(held.control) };
    control.set_nonblocking(true)?;
    let (housekeepers, line) = (shared.clone(), NodeLine::new(config));
    if config.placement.copies > 1 {
        let scrubbed = space.clone();
        // What donors have of sealed pages has other sums than those of the records.
        let records = shared.sealing.is_none().then_some(shared.lock().state.records);
        let bytes_per_s = config.scrub_bytes_per_s;
        spawn("scrub", move || scrub::run(&scrubbed, records, bytes_per_s));
    }
    let config = Arc::new(Mutex::new(config.clone()));
    let pool = Pool { space: space.clone(), config: config.clone() };
    let last_look = pool.clone();
    spawn("housekeeping", move || housekeeping::run(housekeepers, pool, line, control));

    let (renewed, tended) = (space.clone(), space.clone());
    spawn("leases", move || keep_leases(&renewed));
    spawn("upkeep", move || upkeep(&tended));

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

/// Renews the space's leases as long as the process runs. A thread of its own: a donor that says nothing
/// is waited for, and copies are to be made meanwhile.
fn keep_leases(space: &Space) {
    let renewal = space.renew_interval().min(LOOK_AROUND);
    loop {
        std::thread::sleep(renewal);
        // Donors that come, that come back, or that want their memory back are noticed here too.
        space.renew();
    }
}

/// How long a connection may be silent at most, for a renewal not to wait for one donor until the
/// lease at the others has run out. It waits for an answer, a new connection, and two answers on that.
fn longest_silence(lease: Duration) -> Duration {
    lease / 8
}

/// Makes copies that are missing, and moves those that are in the wrong place, as long as the process
/// runs.
fn upkeep(space: &Space) {
    loop {
        if !space.tend(UPKEEP, COPYING_BYTES_PER_S) {
            std::thread::sleep(UPKEEP);
        }
    }
}

/// How often each donor is heard at least.
const LOOK_AROUND: Duration = Duration::from_secs(3);
/// How often it is looked whether copies are missing.
const UPKEEP: Duration = Duration::from_millis(250);
/// What copying between donors for a consumer may take of their networks, in bytes a second: half of
/// what 10 Gbit/s carry.
pub const COPYING_BYTES_PER_S: u64 = 600 << 20;

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
fn end_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(PANICKED);
    }));
}

/// Set by SIGTERM: the programs are ended first, then the pager, so that none of them ever runs
/// without it.
pub(crate) static TERMINATED: AtomicBool = AtomicBool::new(false);

fn end_on_sigterm() {
    extern "C" fn note(_: libc::c_int) {
        TERMINATED.store(true, Relaxed);
    }
    // SAFETY: the handler only stores to an atomic.
    unsafe { libc::signal(libc::SIGTERM, note as *const () as libc::sighandler_t) };
}
