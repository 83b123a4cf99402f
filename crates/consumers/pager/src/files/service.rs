//! Starts what serves shared memory, when a program first asks for some; and takes it over.

use crate::core::close;
use crate::files::backroom::Backroom;
use crate::files::drops::{self, KeeperLine};
use crate::files::fetch::Fetcher;
use crate::files::mount::Mount;
use crate::files::{desk, keeper};
use crate::process::guard;
use crate::programs::attach::accept;
use crate::shared::Shared;
use hecaton_fuse::device::Device;
use hecaton_fuse::wire;
use hecaton_space::Space;
use hecaton_uffd::files::Answer;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Threads that fetch pages from donors for reads. Each has a way of its own to every donor.
const READERS: usize = 2;

/// How long a keeper that was told to end may take.
const KEEPER_PATIENCE: Duration = Duration::from_secs(2);
/// Between two attempts to start a keeper.
const KEEPER_PAUSE: Duration = Duration::from_millis(100);

/// Descriptors of a mount that is being served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldMount {
    /// Where the kernel's requests are read.
    pub(crate) device: RawFd,
    /// Where files are opened.
    pub(crate) directory: RawFd,
    /// The connection to the keeper, and the keeper's process number.
    pub(crate) keeper: Option<(RawFd, u32)>,
}

impl HeldMount {
    /// All of them, with the labels under which the node holds them.
    pub(crate) fn labelled(&self) -> Vec<(String, RawFd)> {
        let keeper = self.keeper.map(|(fd, pid)| (guard::keeper_label(pid), fd));
        [(guard::FILES_DEVICE, self.device), (guard::FILES_DIRECTORY, self.directory)]
            .into_iter()
            .map(|(label, fd)| (label.to_owned(), fd))
            .chain(keeper)
            .collect()
    }
}

/// Serves what a predecessor has served.
pub(crate) fn take_over(
    shared: &Arc<Shared>,
    space: &Arc<Space>,
    listener: RawFd,
    mount: HeldMount,
) -> io::Result<()> {
    // SAFETY: the node's copies, which nobody else closes.
    let [device, directory] =
        [mount.device, mount.directory].map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
    // What it had read and not answered.
    rustix::io::write(device, &wire::resend())?;
    let ways = Ways { device, directory, listener };
    serve(shared, space, &ways, mount.keeper)
}

/// A program has connected to ask for shared memory. True if the keeper answers it; else it was
/// refused, and so is who comes next.
pub(crate) fn begin(shared: &Arc<Shared>, space: &Arc<Space>, listener: RawFd) -> bool {
    let begun = Mount::new().and_then(|Mount { device, directory }| {
        // Linux before 6.9 cannot: a pager that is killed would leave programs waiting for ever.
        rustix::io::write(&device, &wire::resend())
            .map_err(|_| io::Error::other("it takes Linux 6.9 or newer"))?;
        let (device, directory) = (leak(device), leak(directory));
        let mount = HeldMount {
            device: device.as_raw_fd(),
            directory: directory.as_raw_fd(),
            keeper: None,
        };
        let core = shared.lock();
        let (labels, fds): (_, Vec<RawFd>) = mount.labelled().into_iter().unzip();
        core.guard.hold(labels, &fds);
        drop(core);
        serve(shared, space, &Ways { device, directory, listener }, None)
    });
    if let Err(error) = &begun {
        tracing::warn!(%error, "shared memory of programs stays local");
        if let Some(program) = accept(listener) {
            // SAFETY: just accepted.
            let socket = unsafe { BorrowedFd::borrow_raw(program) };
            let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
            let _ = rustix::net::send(socket, Answer::of(libc::ENOSYS).as_bytes(), flags);
            close(program);
        }
    }
    begun.is_ok()
}

/// The descriptors that stay open as long as the process.
#[derive(Clone, Copy)]
struct Ways<'a> {
    device: BorrowedFd<'a>,
    directory: BorrowedFd<'a>,
    listener: RawFd,
}

fn leak(fd: OwnedFd) -> BorrowedFd<'static> {
    use std::os::fd::IntoRawFd;
    // SAFETY: it is never closed.
    unsafe { BorrowedFd::borrow_raw(fd.into_raw_fd()) }
}

fn serve(
    shared: &Arc<Shared>,
    space: &Arc<Space>,
    ways: &Ways<'_>,
    keeper: Option<(RawFd, u32)>,
) -> io::Result<()> {
    let (device, backroom) = (Arc::new(device(ways)?), Backroom::default());
    for is_for_reads in std::iter::repeat_n(true, READERS).chain([false]) {
        let lane = space.lane().map_err(io::Error::other)?;
        let fetcher = Fetcher::new(Arc::clone(shared), lane);
        let (room, shared, device) = (backroom.clone(), Arc::clone(shared), Arc::clone(&device));
        spawn("back room", move || room.work(is_for_reads, shared, fetcher, &device))?;
    }
    let (its, at) = (Arc::clone(shared), Arc::clone(&device));
    spawn("desk", move || desk::run(&its, &at, &backroom))?;
    let keeping = Keeping {
        shared: Arc::clone(shared),
        device,
        directory: ways.directory.try_clone_to_owned()?,
        // SAFETY: it stays open as long as the process.
        listener: unsafe { BorrowedFd::borrow_raw(ways.listener) }.try_clone_to_owned()?,
        raw: HeldMount {
            device: ways.device.as_raw_fd(),
            directory: ways.directory.as_raw_fd(),
            keeper,
        },
    };
    shared.lock().files.mount = Some(keeping.raw);
    let line = match keeper {
        // SAFETY: the node's copy, which nobody else closes.
        Some((fd, _)) => unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?,
        None => keeping.start()?,
    };
    spawn("keeper", move || keeping.run(line))
}

fn device(ways: &Ways<'_>) -> io::Result<Device> {
    Ok(Device::new(ways.device.try_clone_to_owned()?, "shared memory"))
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(body).map(drop)
}

/// The keeper of this process, if it has started it.
static KEEPER: Mutex<Option<Child>> = Mutex::new(None);

/// What it takes to start keepers.
struct Keeping {
    shared: Arc<Shared>,
    device: Arc<Device>,
    directory: OwnedFd,
    listener: OwnedFd,
    raw: HeldMount,
}

impl Keeping {
    /// Starts a keeper; the node holds the connection to it.
    fn start(&self) -> io::Result<OwnedFd> {
        let [directory, listener] = [&self.directory, &self.listener].map(AsFd::as_fd);
        let (child, line) = keeper::start(directory, self.device.as_fd(), listener)?;
        let pid = child.id();
        let mut core = self.shared.lock();
        let label = guard::keeper_label(pid);
        core.guard.hold(vec![label], &[line.as_raw_fd()]);
        core.files.mount = Some(HeldMount { keeper: Some((line.as_raw_fd(), pid)), ..self.raw });
        drop(core);
        *KEEPER.lock().expect("no thread panics with it") = Some(child);
        Ok(line)
    }

    /// Has pages dropped, as long as the process runs.
    fn run(self, line: OwnedFd) {
        let mut line = Arc::new(line);
        loop {
            self.shared.lock().files.keeper = Some(KeeperLine(Arc::clone(&line)));
            self.shared.evict.notify_one();
            drops::listen(&self.shared, &line);
            if self.shared.lock().over {
                return;
            }
            tracing::warn!("the keeper of shared memory was killed; starting another");
            reap(Duration::MAX);
            let mut core = self.shared.lock();
            let keeper = core.files.mount.and_then(|mount| mount.keeper);
            if let Some((_, pid)) = keeper {
                core.guard.release_labels(vec![guard::keeper_label(pid)]);
            }
            drop(core);
            line = loop {
                match self.start() {
                    Ok(line) => break Arc::new(line),
                    Err(error) => tracing::warn!(%error, "a keeper cannot be started"),
                }
                std::thread::sleep(KEEPER_PAUSE);
            };
        }
    }
}

/// The consumer has ended, and so does the keeper.
pub(crate) fn end(shared: &Shared) {
    let keeper = shared.lock().files.keeper.take();
    if let Some(line) = keeper {
        line.end();
        reap(KEEPER_PATIENCE);
    }
}

/// Waits for a keeper that this process has started, and kills it when it takes too long.
fn reap(patience: Duration) {
    let Some(mut child) = KEEPER.lock().expect("no thread panics with it").take() else { return };
    let began = Instant::now();
    while let Ok(None) = child.try_wait() {
        if began.elapsed() >= patience {
            // It may have ended by now.
            let _ = child.kill();
            let _ = child.wait();
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
