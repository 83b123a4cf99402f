//! `hecaton donor`: the process that lends memory and serves pages. The node starts it with a
//! socket as its standard input. Down come the donor's settings and the memory of the process
//! before it. Up go its own memory, for the node to keep, and its state once a second.
//!
//! When that socket ends without an order, the node was killed. The donor then serves on. When
//! another node adopts it, the donor repeats all that on the new connection.

use anyhow::{Context as _, anyhow};
use hecaton_donor::{Donor, DonorConfig, DonorFds, ParkConfig, Serving};
use hecaton_memory::Size;
use hecaton_memory::locked::lock_process;
use hecaton_node::adoption::{AdoptionSocket, Answer, NodeStream};
use hecaton_node::channel::{self, Receiver};
use hecaton_node::donors::{DonorEvent, DonorOrder, DonorStart, LISTENER};
use serde::Serialize;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

/// Time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) fn run() -> anyhow::Result<ExitCode> {
    let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut receiver = Receiver::new(stream.try_clone()?);
    let start: Option<DonorStart> = receiver.receive().unwrap_or_default();
    let start = start.context("this command is started by `hecaton node`, with a socket to it")?;
    let fds = receiver.take_fds(start.labels.len())?;
    let node = NodeStream { stream, receiver };
    let process = match Process::start(&node, start, fds) {
        Ok(process) => process,
        Err(error) => {
            // The node says it.
            channel::send(&node.stream, &DonorEvent::Failed(format!("{error:#}")), &[])?;
            return Ok(ExitCode::FAILURE);
        }
    };
    process.run(node)?;
    Ok(ExitCode::SUCCESS)
}

/// A donor that serves.
struct Process {
    donor: Donor,
    serving: Serving,
    listener: TcpListener,
    memory: DonorFds,
    /// Start message for a process that replaces this one.
    start: DonorStart,
    /// `None` if it is to end with the node.
    adoption: Option<AdoptionSocket>,
}

/// An event for the reporting thread to send, if there is one. It sends the statistics after it.
type News = Option<DonorEvent>;

/// Why a node is not listened to any more.
enum Over {
    /// It wants the donor to end.
    Stop,
    /// It was killed.
    NodeGone,
}

impl Process {
    fn start(
        node: &NodeStream,
        mut start: DonorStart,
        fds: Vec<OwnedFd>,
    ) -> anyhow::Result<Process> {
        let mut listener = None;
        let mut held = Vec::new();
        for (label, fd) in start.labels.drain(..).zip(fds) {
            match label.as_str() {
                LISTENER => listener = Some(TcpListener::from(fd)),
                _ => held.push((label, fd)),
            }
        }
        let listener = listener.ok_or_else(|| anyhow!("the node sent no listening socket"))?;
        let config = DonorConfig {
            numa_node: start.memory.numa_node,
            huge_pages: start.memory.huge_pages,
            keep_free: start.keep_free_bytes.map(Size),
            tls_dir: start.tls_dir.clone(),
            park: start.park.as_ref().map(|park| ParkConfig {
                limit: park.limit_bytes.map(Size),
                ..ParkConfig::new(&park.dir)
            }),
            ..DonorConfig::new(&start.name, listener.local_addr()?, Size(start.lend_bytes))
        };
        let donor = Donor::open(&config, DonorFds::from_labelled(held)?)?;
        donor.set_draining(start.draining);
        donor.set_limit(start.limit_bytes.map(Size));
        let adoption = start.outlive.as_ref().map(AdoptionSocket::listen).transpose();
        let adoption = adoption.context("cannot listen for another node")?;
        let memory = donor.fds()?;
        let (labels, fds): (Vec<_>, Vec<_>) =
            memory.labelled().map(|(label, fd)| (label.to_owned(), fd)).unzip();
        start.locked = Some(start.locked == Some(true));
        start.labels = [vec![LISTENER.to_owned()], labels.clone()].concat();
        // Before the first page is served, so that none is lost with this process.
        say(&node.stream, &DonorEvent::HoldFds(labels), &fds);
        let serving = donor.serve(listener.try_clone()?)?;
        Ok(Process { donor, serving, listener, memory, start, adoption })
    }

    /// Serves until a node says that it is enough, or none has come for too long.
    fn run(mut self, mut node: NodeStream) -> anyhow::Result<()> {
        let mut is_to_lock = self.start.locked == Some(true);
        loop {
            say(&node.stream, &DonorEvent::Serving, &[]);
            let (stream, reported) = (node.stream.try_clone()?, self.donor.clone());
            let (obeyed, news) = mpsc::channel();
            let report = move || report(&stream, &reported, &news);
            thread::Builder::new().name("donor-reports".into()).spawn(report)?;
            if std::mem::take(&mut is_to_lock) {
                self.lock_beside(&obeyed);
            }
            match self.obey(&mut node.receiver, &obeyed) {
                Over::Stop => break,
                Over::NodeGone => {}
            }
            let Some(adoption) = &mut self.adoption else { break };
            let (donor, patience) = (&self.start.name, adoption.outlive().patience);
            tracing::warn!(donor, ?patience, "the node is gone; serving on until another comes");
            let Some(next) = adoption.wait(Some(patience))? else {
                tracing::warn!(donor, "no node has come; giving the memory back");
                break;
            };
            node = next;
            self.start.outlive = Some(adoption.outlive().clone());
            let memory = self.memory.labelled().map(|(_, fd)| fd);
            let fds: Vec<_> = [self.listener.as_fd()].into_iter().chain(memory).collect();
            say(&node.stream, &Answer::Adopted(&self.start), &fds);
        }
        self.serving.stop();
        Ok(())
    }

    /// Does what the node says, and says each time that it was done.
    fn obey(&mut self, receiver: &mut Receiver, obeyed: &Sender<News>) -> Over {
        loop {
            match receiver.receive() {
                Ok(Some(DonorOrder::Drain(draining))) => {
                    self.start.draining = draining;
                    self.donor.set_draining(draining);
                }
                Ok(Some(DonorOrder::Limit(limit_bytes))) => {
                    self.start.limit_bytes = limit_bytes;
                    self.donor.set_limit(limit_bytes.map(Size));
                }
                Ok(Some(DonorOrder::Lock)) => {
                    self.start.locked = Some(true);
                    self.lock_beside(obeyed);
                }
                Ok(Some(DonorOrder::Stop)) => return Over::Stop,
                Ok(None) => return Over::NodeGone,
                Err(error) => {
                    tracing::warn!(%error, "what the node says is not understood");
                    return Over::NodeGone;
                }
            }
            // Without anybody who reports the node is gone, which is seen when it is listened to.
            let _ = obeyed.send(None);
        }
    }

    /// Locks while the donor serves: what is swapped out takes as long as the swap does, and that
    /// may wait for this donor.
    fn lock_beside(&self, obeyed: &Sender<News>) {
        let (donor, said) = (self.donor.clone(), obeyed.clone());
        let locks = thread::Builder::new().name("donor-lock".into()).spawn(move || {
            let refused = lock(&donor).err().map(|error| format!("{error:#}"));
            let _ = said.send(Some(DonorEvent::Locked(refused)));
        });
        if let Err(error) = locks {
            let refused = Some(format!("a thread cannot be started: {error}"));
            let _ = obeyed.send(Some(DonorEvent::Locked(refused)));
        }
    }
}

/// Keeps this process and what it lends from being swapped out.
fn lock(donor: &Donor) -> anyhow::Result<()> {
    // `lock_process` passes over memory that is locked already. It takes longer for mapped memory.
    let lent = donor.lock_memory().context("the kernel does not lock what the donor lends");
    let process = lock_process().context("the donor's process cannot be locked");
    lent.and(process)
}

/// A node that does not take it has been killed, which is seen when it is listened to.
fn say(node: &UnixStream, what: &impl Serialize, fds: &[BorrowedFd<'_>]) {
    if let Err(error) = channel::send(node, what, fds) {
        tracing::debug!(%error, "the node did not take what the donor had to say");
    }
}

/// Reports until the node is gone, now and then and whenever there is news.
fn report(node: &UnixStream, donor: &Donor, news: &mpsc::Receiver<News>) {
    while channel::send(node, &DonorEvent::Stats(Box::new(donor.snapshot())), &[]).is_ok() {
        match news.recv_timeout(REPORT_INTERVAL) {
            Ok(Some(event)) => say(node, &event, &[]),
            Ok(None) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
