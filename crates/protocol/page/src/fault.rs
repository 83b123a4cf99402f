//! A network that misbehaves on purpose, to put between a borrower and a donor in tests.
//!
//! [`Chaos`] is a TCP proxy in this process, and not a wrapper of the stream type: both ends then
//! run exactly the code that they run in earnest, descriptors, polls and gathered sends included.
//!
//! The stream of each direction is divided into grains, and every grain draws its fate from a
//! generator seeded by the proxy's seed, the connection's number and the direction. Fates depend on
//! the place in the stream only, not on how the kernel happened to cut it up.

use hecaton_memory::SplitMix;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Faults of grains, each as a number out of a million grains. The default is a good network.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Bytes that share a fate.
    pub grain_bytes: usize,
    /// Bytes at the start of each direction that always pass, such as those of the greetings.
    pub spared_bytes: u64,
    /// Grains that wait before they go on.
    pub delayed: u32,
    /// How long those wait.
    pub delay: Duration,
    /// Grains that vanish from the stream.
    pub dropped: u32,
    /// Grains that have one bit turned.
    pub corrupted: u32,
    /// Grains at which the connection is cut, both ways.
    pub cut: u32,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            grain_bytes: 1024,
            spared_bytes: 0,
            delayed: 0,
            delay: Duration::from_millis(1),
            dropped: 0,
            corrupted: 0,
            cut: 0,
        }
    }
}

/// A running proxy. Dropping it cuts everything.
pub struct Chaos {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    target: SocketAddr,
    seed: u64,
    plan: Mutex<Plan>,
    wake: OwnedFd,
    stopping: AtomicBool,
    deaf: AtomicBool,
    corrupt_next: AtomicBool,
    connections: AtomicU64,
    streams: Mutex<Vec<TcpStream>>,
    pumps: Mutex<Vec<JoinHandle<()>>>,
}

impl Chaos {
    /// Stands before `target` on a free port of the loopback interface.
    pub fn before(target: SocketAddr, plan: Plan, seed: u64) -> io::Result<Chaos> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            target,
            seed,
            plan: Mutex::new(plan),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stopping: AtomicBool::new(false),
            deaf: AtomicBool::new(false),
            corrupt_next: AtomicBool::new(false),
            connections: AtomicU64::new(0),
            streams: Mutex::default(),
            pumps: Mutex::default(),
        });
        let acceptor = thread::Builder::new().name("chaos".into()).spawn({
            let shared = shared.clone();
            move || accept(&listener, &shared)
        })?;
        Ok(Chaos { address, shared, acceptor: Some(acceptor) })
    }

    /// Where to connect instead of the target.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connections that came so far.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Another plan, from the next grains on.
    pub fn set_plan(&self, plan: Plan) {
        *lock(&self.shared.plan) = plan;
    }

    /// One bit is turned in the next grain that begins, of whichever connection, and in no other.
    pub fn corrupt_next_grain(&self) {
        self.shared.corrupt_next.store(true, Ordering::Release);
    }

    /// Cuts all connections. New ones may come.
    pub fn cut_all(&self) {
        for stream in lock(&self.shared.streams).drain(..) {
            // It may be cut already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Whether new connections are accepted and then left in silence, as a donor does that hangs.
    pub fn set_deaf(&self, deaf: bool) {
        self.shared.deaf.store(deaf, Ordering::Release);
    }
}

impl Drop for Chaos {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // The counter of a fresh eventfd has room, so that this cannot fail.
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        self.cut_all();
        let pumps = std::mem::take(&mut *lock(&self.shared.pumps));
        for pump in pumps {
            let _ = pump.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    while !shared.stopping.load(Ordering::Acquire) {
        let mut fds =
            [PollFd::new(listener, PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)];
        // An interrupted poll reports nothing, and is begun again.
        let _ = poll(&mut fds, None);
        let Ok((near, _)) = listener.accept() else { continue };
        let number = shared.connections.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = join_ends(near, number, shared) {
            tracing::debug!(%error, "the proxy cannot reach its target");
        }
    }
}

fn join_ends(near: TcpStream, number: u64, shared: &Arc<Shared>) -> io::Result<()> {
    near.set_nonblocking(false)?;
    near.set_nodelay(true)?;
    if shared.deaf.load(Ordering::Acquire) {
        lock(&shared.streams).push(near);
        return Ok(());
    }
    let far = TcpStream::connect(shared.target)?;
    far.set_nodelay(true)?;
    lock(&shared.streams).extend([near.try_clone()?, far.try_clone()?]);
    let ends = [(near.try_clone()?, far.try_clone()?), (far, near)];
    for (direction, (from, to)) in ends.into_iter().enumerate() {
        let seed = shared.seed ^ (number * 2 + direction as u64).wrapping_mul(0x9e37_79b9);
        let dice = Dice(SplitMix::new(seed));
        let shared_too = shared.clone();
        let pump = thread::Builder::new().name("chaos-pump".into()).spawn(move || {
            // An error of either end ends both, which is all that a proxy can do about it.
            let _ = pump(&from, &to, dice, &shared_too);
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
        })?;
        lock(&shared.pumps).push(pump);
    }
    Ok(())
}

/// The fate of one grain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Pass,
    Delay(Duration),
    Drop,
    /// Turns the bit of this number, counted from the start of the grain.
    Corrupt(usize),
    Cut,
}

fn pump(
    mut from: &TcpStream,
    mut to: &TcpStream,
    mut dice: Dice,
    shared: &Shared,
) -> io::Result<()> {
    let mut grain = Vec::new();
    let mut passed = 0u64;
    loop {
        let plan = *lock(&shared.plan);
        let spared = plan.spared_bytes.saturating_sub(passed);
        let (size, fate) = match usize::try_from(spared) {
            Ok(0) | Err(_) if shared.corrupt_next.swap(false, Ordering::AcqRel) => {
                (plan.grain_bytes.max(1), Fate::Corrupt(dice.bit(&plan)))
            }
            Ok(0) | Err(_) => (plan.grain_bytes.max(1), dice.fate(&plan)),
            Ok(spared) => (spared, Fate::Pass),
        };
        grain.resize(size, 0);
        let mut at = 0;
        while at < size {
            let count = from.read(&mut grain[at..])?;
            if count == 0 {
                return Ok(());
            }
            let piece = at..at + count;
            match fate {
                Fate::Pass | Fate::Drop => {}
                Fate::Delay(delay) if at == 0 => thread::sleep(delay),
                Fate::Delay(_) => {}
                Fate::Corrupt(bit) if piece.contains(&(bit / 8)) => {
                    grain[bit / 8] ^= 1 << (bit % 8)
                }
                Fate::Corrupt(_) => {}
                Fate::Cut => return Ok(()),
            }
            if fate != Fate::Drop {
                to.write_all(&grain[piece])?;
            }
            at += count;
        }
        passed += size as u64;
    }
}

/// Draws the fate of each grain.
struct Dice(SplitMix);

impl Dice {
    fn bit(&mut self, plan: &Plan) -> usize {
        self.0.draw() as usize % (plan.grain_bytes.max(1) * 8)
    }

    fn fate(&mut self, plan: &Plan) -> Fate {
        let bit = self.bit(plan);
        let mut roll = (self.0.draw() % 1_000_000) as u32;
        for (rate, fate) in [
            (plan.cut, Fate::Cut),
            (plan.dropped, Fate::Drop),
            (plan.corrupted, Fate::Corrupt(bit)),
            (plan.delayed, Fate::Delay(plan.delay)),
        ] {
            if roll < rate {
                return fate;
            }
            roll -= rate;
        }
        Fate::Pass
    }
}
