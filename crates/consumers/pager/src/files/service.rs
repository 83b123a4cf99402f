//! Starts serving shared memory, or takes over from a killed pager.

use crate::files::fetch::Fetcher;
use crate::files::held::{HeldMount, KeeperLine};
use crate::files::keeper::messages::Order;
use crate::files::mount::Mount;
use crate::files::workers::Workers;
use crate::files::{dispatcher, evict, keeper};
use crate::process::guard;
use crate::shared::Shared;
use hecaton_fuse::device::Device;
use hecaton_fuse::wire;
use hecaton_space::Space;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Workers that answer reads. Each has a lane to the donors of its own.
const READERS: usize = 2;

/// Time for a keeper to end after the order to end. Then it is killed.
const KEEPER_PATIENCE: Duration = Duration::from_secs(2);
const KEEPER_PAUSE: Duration = Duration::from_millis(100);

/// Serves programs that connect to `listener`. Their pager's socket is `programs`. `left` is the
/// predecessor's mount, if it had one.
pub(crate) fn begin(
    shared: &Arc<Shared>,
    space: &Arc<Space>,
    listener: RawFd,
    programs: PathBuf,
    left: Option<HeldMount>,
) -> io::Result<()> {
    if let Some(mount) = left {
        // SAFETY: received from the node, and closed nowhere.
        let [device, directory] =
            [mount.device, mount.directory].map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
        // Requests that the predecessor read and did not answer.
        rustix::io::write(device, &wire::resend())?;
        let ways = Ways { device, directory, listener, programs };
        return serve(shared, space, ways, mount.keeper);
    }
    let Mount { device, directory } = Mount::new()?;
    let (device, directory) = (leak(device), leak(directory));
    let mount =
        HeldMount { device: device.as_raw_fd(), directory: directory.as_raw_fd(), keeper: None };
    let (labels, fds): (_, Vec<RawFd>) = mount.labelled().into_iter().unzip();
    shared.lock().guard.hold(labels, &fds);
    serve(shared, space, Ways { device, directory, listener, programs }, None)
}

/// Descriptors that stay open until the process ends, and the socket of the programs' pager.
struct Ways<'a> {
    device: BorrowedFd<'a>,
    directory: BorrowedFd<'a>,
    listener: RawFd,
    programs: PathBuf,
}

fn leak(fd: OwnedFd) -> BorrowedFd<'static> {
    use std::os::fd::IntoRawFd;
    // SAFETY: it is never closed.
    unsafe { BorrowedFd::borrow_raw(fd.into_raw_fd()) }
}

fn serve(
    shared: &Arc<Shared>,
    space: &Arc<Space>,
    ways: Ways<'_>,
    keeper: Option<(RawFd, u32)>,
) -> io::Result<()> {
    let device = Arc::new(Device::new(ways.device.try_clone_to_owned()?, "shared memory"));
    let workers = Arc::new(Workers::new(Arc::clone(shared), Arc::clone(&device)));
    let each = std::iter::repeat_n(Workers::read as fn(&Workers, Fetcher), READERS);
    for work in each.chain([Workers::change, Workers::answer_late]) {
        let lane = space.lane().map_err(io::Error::other)?;
        let fetcher = Fetcher::new(Arc::clone(shared), lane);
        let workers = Arc::clone(&workers);
        spawn("file workers", move || work(&workers, fetcher))?;
    }
    let (its, at) = (Arc::clone(shared), Arc::clone(&device));
    spawn("dispatcher", move || dispatcher::run(&its, &at, &workers))?;
    let keeping = Keeping {
        shared: Arc::clone(shared),
        device,
        directory: ways.directory.try_clone_to_owned()?,
        // SAFETY: open until the process ends.
        listener: unsafe { BorrowedFd::borrow_raw(ways.listener) }.try_clone_to_owned()?,
        programs: ways.programs,
        raw: HeldMount {
            device: ways.device.as_raw_fd(),
            directory: ways.directory.as_raw_fd(),
            keeper,
        },
    };
    shared.lock().files.mount = Some(keeping.raw);
    let line = match keeper {
        // SAFETY: received from the node, and closed nowhere.
        Some((fd, _)) => unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?,
        None => keeping.start()?,
    };
    spawn("keeper", move || keeping.run(line))
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(body).map(drop)
}

/// `None` after a takeover, until another keeper starts: the predecessor started the present one.
static KEEPER: Mutex<Option<Child>> = Mutex::new(None);

struct Keeping {
    shared: Arc<Shared>,
    device: Arc<Device>,
    directory: OwnedFd,
    listener: OwnedFd,
    programs: PathBuf,
    raw: HeldMount,
}

impl Keeping {
    /// Starts a keeper, and hands its connection to the node.
    fn start(&self) -> io::Result<OwnedFd> {
        let [directory, listener] = [&self.directory, &self.listener].map(AsFd::as_fd);
        let (device, programs) = (self.device.as_fd(), &self.programs);
        let ways = keeper::Ways { directory, device, listener, programs };
        let (child, line) = keeper::start(&ways)?;
        let pid = child.id();
        let mut core = self.shared.lock();
        let label = guard::keeper_label(pid);
        core.guard.hold(vec![label], &[line.as_raw_fd()]);
        core.files.mount = Some(HeldMount { keeper: Some((line.as_raw_fd(), pid)), ..self.raw });
        drop(core);
        KeeperLine::send_on(&line, &Order::Held);
        *KEEPER.lock().expect("no thread panics with it") = Some(child);
        Ok(line)
    }

    /// Handles the keeper's reports, and restarts the keeper, until the consumer has ended.
    fn run(self, line: OwnedFd) {
        let mut line = Arc::new(line);
        loop {
            self.shared.lock().files.keeper = Some(KeeperLine(Arc::clone(&line)));
            self.shared.evict.notify_one();
            evict::listen(&self.shared, &line);
            if self.shared.lock().over {
                return;
            }
            tracing::warn!("the keeper of shared memory has ended; starting another");
            reap(Duration::MAX);
            let core = self.shared.lock();
            let keeper = core.files.mount.and_then(|mount| mount.keeper);
            if let Some((_, pid)) = keeper {
                core.guard.release_labels(vec![guard::keeper_label(pid)]);
            }
            drop(core);
            line = loop {
                match self.start() {
                    Ok(line) => break Arc::new(line),
                    Err(error) => tracing::warn!(%error, "cannot start a keeper of shared memory"),
                }
                std::thread::sleep(KEEPER_PAUSE);
            };
        }
    }
}

/// Ends the keeper after the consumer has ended. If the memory is lost, the keeper ends by itself:
/// it may be waiting for an answer that is never given.
pub(crate) fn end(shared: &Shared) {
    let mut core = shared.lock();
    let keeper = core.files.keeper.take().filter(|_| core.failed.is_none());
    drop(core);
    if let Some(line) = keeper {
        line.end();
        reap(KEEPER_PATIENCE);
    }
}

/// Waits for the keeper to end, if this process started it. Kills it after `patience`.
fn reap(patience: Duration) {
    let Some(mut child) = KEEPER.lock().expect("no thread panics with it").take() else { return };
    let began = Instant::now();
    while let Ok(None) = child.try_wait() {
        if began.elapsed() >= patience {
            // Fails if the keeper has just ended.
            let _ = child.kill();
            let _ = child.wait();
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
