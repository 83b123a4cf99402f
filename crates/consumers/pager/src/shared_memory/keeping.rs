//! Starts keepers of shared memory, and does what they say.

use super::division::{self, Part};
use super::unmap::Unmap;
use crate::config::PagerConfig;
use crate::core::Core;
use crate::shared::Shared;
use crate::state::Flag;
use crate::stats::SharedMemory;
use hecaton_memory::{PAGE_SIZE, pages_for_bytes, pages_to_bytes};
use hecaton_shared::line::{self, Order, Receiver, Report, Start, Usage};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Between two looks whether the consumer has ended, before a program asks.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// Pause before another keeper is started.
const PAUSE: Duration = Duration::from_millis(100);

/// Keepers that may end in turn before one is ready.
const MAX_FAILURES: u32 = 20;

/// Between two divisions of local memory.
const DIVISIONS: Duration = Duration::from_secs(1);

/// Time for a keeper to read an order. It may be stopped.
const PATIENCE: Duration = Duration::from_secs(1);

/// State of the shared memory, under the pager's lock.
#[derive(Debug, Default)]
pub(crate) struct Files {
    /// Pages that own pages and files may have together; 0 while there are no files.
    total: u64,
    /// Pages of files that are to be unmapped.
    pub(super) unmaps: VecDeque<Unmap>,
}

impl Core {
    /// Own pages and files may have so many pages together.
    pub(crate) fn resize(&mut self, pages: u64) {
        match self.files.total {
            0 => self.set_limit(pages),
            // The next division sets the limits of both parts.
            before => {
                self.files.total = pages;
                let limit = self.limit;
                self.set_limit((limit * pages / before).clamp(1, pages));
            }
        }
    }

    /// Pages that own pages and files may have together.
    pub(crate) fn total_limit(&self) -> u64 {
        if self.files.total == 0 { self.limit } else { self.files.total }
    }
}

/// What keepers need, and what is done for them.
pub(crate) struct Keeping {
    pub(crate) shared: Arc<Shared>,
    pub(crate) config: Arc<Mutex<PagerConfig>>,
    pub(crate) listener: OwnedFd,
}

/// How a keeper has ended.
enum End {
    /// It said that it cannot keep shared memory here.
    Refused(String),
    /// It was killed, or failed. Whether it had been ready.
    Gone(bool),
}

/// Local memory of the files.
struct Division {
    /// Bytes that files are to have.
    wanted: u64,
    /// Bytes that the keeper was told.
    told: u64,
    /// When memory was divided last, and pages fetched back until then: own ones, and of files.
    last: Option<(Instant, u64, u64)>,
    /// Statistics when the keeper was started.
    before: SharedMemory,
}

impl Keeping {
    /// Runs until the consumer has ended.
    pub(crate) fn run(self) {
        if !self.wait_for_question() {
            return;
        }
        let mut core = self.shared.lock();
        core.state.note(Flag::SharedMemory, true);
        core.files.total = core.limit;
        drop(core);
        let mut failures = 0;
        while !self.shared.lock().over {
            match self.keep() {
                Ok(End::Gone(true)) => failures = 0,
                Ok(End::Refused(reason)) => return self.refuse(&reason),
                Ok(End::Gone(false)) => failures += 1,
                Err(error) => {
                    tracing::warn!(%error, "cannot start a keeper of shared memory");
                    failures += 1;
                }
            }
            if failures > MAX_FAILURES {
                return self.refuse("its keepers end at once");
            }
            thread::sleep(PAUSE);
        }
    }

    /// Waits until a program asks, unless one has asked before. False if the consumer has ended.
    fn wait_for_question(&self) -> bool {
        loop {
            let core = self.shared.lock();
            if core.over {
                return false;
            }
            if core.state.is(Flag::SharedMemory) {
                return true;
            }
            drop(core);
            let mut polled = [PollFd::new(&self.listener, PollFlags::IN)];
            if poll(&mut polled, Some(&LOOK)).is_ok_and(|ready| ready > 0) {
                return true;
            }
        }
    }

    /// Programs that ask find nobody, and keep their shared memory local.
    fn refuse(&self, reason: &str) {
        tracing::warn!(reason, "shared memory of programs stays local");
        let _ = shutdown(&self.listener, Shutdown::Both);
        let mut core = self.shared.lock();
        let total = core.total_limit();
        core.files.total = 0;
        core.set_limit(total);
    }

    /// Runs one keeper to its end.
    fn keep(&self) -> io::Result<End> {
        let (mut child, stream) = spawn(self.listener.as_fd())?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut receiver = Receiver::new(stream.try_clone()?);
        let line = Arc::new(Mutex::new(stream));
        let mut division = self.first_division();
        let end = match send(&line, &Order::Start(self.start(division.told))) {
            Ok(()) => self.obey(&line, &mut receiver, &mut division),
            Err(_) => End::Gone(false),
        };
        // It ends with the line, unless it is stopped or waits for a disk: a process of the system
        // collects it then.
        drop((line, receiver));
        reap(&mut child);
        self.shared.lock().files.unmaps.clear();
        Ok(end)
    }

    fn obey(
        &self,
        line: &Arc<Mutex<UnixStream>>,
        receiver: &mut Receiver,
        division: &mut Division,
    ) -> End {
        let mut device = None;
        loop {
            let report = match receiver.receive() {
                Ok(Some(report)) => report,
                Ok(None) => return End::Gone(device.is_some()),
                Err(error) => {
                    tracing::warn!(%error, "what the keeper of shared memory says is not understood");
                    return End::Gone(device.is_some());
                }
            };
            match report {
                Report::Ready(its) => device = Some(its),
                Report::Refused(reason) => return End::Refused(reason),
                Report::Usage(usage) => {
                    if let Some(limit) = self.divide(division, usage)
                        && send(line, &Order::Limit(limit)).is_ok()
                    {
                        division.told = limit;
                    }
                }
                Report::Unmap { number, runs } => {
                    let line = Arc::clone(line);
                    let device = device.unwrap_or_default();
                    let unmap = Unmap { number, device, runs, line };
                    self.shared.lock().files.unmaps.push_back(unmap);
                    self.shared.evict.notify_one();
                }
            }
        }
    }

    fn first_division(&self) -> Division {
        let mut core = self.shared.lock();
        let total = pages_to_bytes(core.total_limit());
        let wanted = division::first(total);
        let used = pages_to_bytes(core.resident);
        let (own, files) = division::for_now(total, wanted, used, 0);
        core.set_limit(pages_for_bytes(own));
        self.shared.evict.notify_one();
        Division { wanted, told: files, last: None, before: core.stats.shared_memory }
    }

    /// Divides local memory. Returns the limit of files, if it is new.
    fn divide(&self, division: &mut Division, usage: Usage) -> Option<u64> {
        let mut core = self.shared.lock();
        let total = pages_to_bytes(core.total_limit());
        let used = pages_to_bytes(core.resident);
        let came_back = core.stats.pages_in + core.stats.staging_faults;
        let files_came_back = usage.read_bytes / PAGE_SIZE as u64;
        if division.last.is_none_or(|(then, ..)| then.elapsed() >= DIVISIONS) {
            if let Some((_, own_before, files_before)) = division.last {
                let own = Part {
                    limit: pages_to_bytes(core.limit),
                    used,
                    came_back: came_back.saturating_sub(own_before),
                };
                let files = Part {
                    limit: division.wanted,
                    used: usage.resident_bytes,
                    came_back: files_came_back.saturating_sub(files_before),
                };
                division.wanted = division::divide(total, own, files);
            }
            division.last = Some((Instant::now(), came_back, files_came_back));
        }
        let (own, files) = division::for_now(total, division.wanted, used, usage.resident_bytes);
        core.set_limit(pages_for_bytes(own));
        core.stats.shared_memory.note(usage, &division.before, files);
        drop(core);
        self.shared.evict.notify_one();
        (files != division.told).then_some(files)
    }

    fn start(&self, limit_bytes: u64) -> Start {
        let config = self.config.lock().expect("no thread panics with it");
        let mut record = super::socket(&config).into_os_string();
        record.push(".record");
        Start {
            consumer: config.consumer.clone(),
            space: config.space,
            node: config.node.clone().unwrap_or_default(),
            record: record.into(),
            limit_bytes,
            copies: config.placement.copies,
            donors: config.placement.donors.clone(),
            donor_patience_s: config.donor_patience.as_secs(),
            failover_ms: config.failover.as_millis() as u64,
            scrub_bytes_per_s: config.scrub_bytes_per_s,
            copying_bytes_per_s: config.copying_bytes_per_s,
            encrypt: config.encrypt,
        }
    }
}

pub(super) fn send(line: &Mutex<UnixStream>, order: &Order) -> io::Result<()> {
    let stream = line.lock().expect("no thread panics with it");
    line::send(&stream, order).inspect_err(|_| {
        // Half a line may have been sent: the keeper would understand nothing that follows.
        let _ = stream.shutdown(std::net::Shutdown::Both);
    })
}

/// Starts a keeper. Returns this end of the line to it, too.
fn spawn(listener: BorrowedFd<'_>) -> io::Result<(Child, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    let child = Command::new("/proc/self/exe")
        .arg0("hecaton")
        .arg("shared-memory-keeper")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::from(listener.try_clone_to_owned()?))
        // The node waits until the pager's process group has ended. The keeper may wait for a disk.
        .process_group(0)
        .spawn()?;
    Ok((child, ours))
}

fn reap(child: &mut Child) {
    let began = Instant::now();
    while let Ok(None) = child.try_wait()
        && began.elapsed() < PATIENCE
    {
        thread::sleep(Duration::from_millis(1));
    }
    // Fails if it has ended.
    let _ = child.kill();
    let _ = child.try_wait();
}
