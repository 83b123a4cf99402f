//! `hecaton donor`: the process that lends memory and serves pages. Started by the node, with a
//! socket as its standard input: down it come what the donor is to be and the memory of the process
//! before it, up go its own memory, to be kept, and once a second how it is.

use anyhow::{Context as _, anyhow};
use hecaton_donor::{ARENA_LABEL, Donor, DonorConfig, DonorFds, LEDGER_LABEL, Serving};
use hecaton_memory::Size;
use hecaton_node::channel::{self, Receiver};
use hecaton_node::donors::{DonorEvent, DonorOrder, DonorStart, LISTENER};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

/// Time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) fn run() -> anyhow::Result<ExitCode> {
    let node = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut receiver = Receiver::new(node.try_clone()?);
    let start: Option<DonorStart> = receiver.receive().unwrap_or_default();
    let start = start.context("this command is started by `hecaton node`, with a socket to it")?;
    let fds = receiver.take_fds(start.labels.len())?;
    let (donor, serving) = match serve(&node, &start, fds) {
        Ok(serving) => serving,
        Err(error) => {
            // The node says it.
            channel::send(&node, &DonorEvent::Failed(format!("{error:#}")), &[])?;
            return Ok(ExitCode::FAILURE);
        }
    };
    // Until the node closes its end, at which the donor ends too.
    while let Some(order) = receiver.receive()? {
        match order {
            DonorOrder::Drain(draining) => donor.set_draining(draining),
            DonorOrder::Limit(limit_bytes) => donor.set_limit(limit_bytes.map(Size)),
        }
    }
    serving.stop();
    Ok(ExitCode::SUCCESS)
}

fn serve(
    node: &UnixStream,
    start: &DonorStart,
    fds: Vec<OwnedFd>,
) -> anyhow::Result<(Donor, Serving)> {
    let mut listener = None;
    let mut held = Vec::new();
    for (label, fd) in start.labels.iter().zip(fds) {
        match label.as_str() {
            LISTENER => listener = Some(TcpListener::from(fd)),
            label => held.push((label.to_owned(), fd)),
        }
    }
    let listener = listener.ok_or_else(|| anyhow!("the node sent no listening socket"))?;
    let config = DonorConfig {
        numa_node: start.memory.numa_node,
        huge_pages: start.memory.huge_pages,
        keep_free: start.keep_free_bytes.map(Size),
        ..DonorConfig::new(&start.name, listener.local_addr()?, Size(start.lend_bytes))
    };
    let donor = Donor::open(&config, DonorFds::from_labelled(held)?)?;
    donor.set_draining(start.draining);
    donor.set_limit(start.limit_bytes.map(Size));
    let DonorFds { arena, ledger } = donor.fds()?;
    // Before the first page is served, so that none is lost with this process.
    let labels = vec![ARENA_LABEL.to_owned(), LEDGER_LABEL.to_owned()];
    channel::send(node, &DonorEvent::HoldFds(labels), &[arena.as_fd(), ledger.as_fd()])?;
    let serving = donor.serve(listener)?;
    channel::send(node, &DonorEvent::Serving, &[])?;
    let node = node.try_clone()?;
    let reported = donor.clone();
    thread::Builder::new().name("donor-reports".into()).spawn(move || report(&node, &reported))?;
    Ok((donor, serving))
}

/// Reports until the node is gone.
fn report(node: &UnixStream, donor: &Donor) {
    while channel::send(node, &DonorEvent::Stats(Box::new(donor.snapshot())), &[]).is_ok() {
        thread::sleep(REPORT_INTERVAL);
    }
}
