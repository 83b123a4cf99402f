//! One consumer's pager, process after process.
//!
//! A pager that is killed takes nothing along: the node holds duplicates of its descriptors
//! ([`crate::held`]), so the consumer's faults wait, and the next pager takes them over and answers
//! them. Hence the rule: while descriptors are held, a pager that was killed is started again at
//! once, as often as [`CrashLimit`] allows. One that ends by itself means it: its consumer has ended,
//! or cannot go on.
//!
//! A pager's standard input is a socket. Down it go the configuration and what the pager before it
//! had handed over, and then nothing: when the node closes that direction, the launcher will start
//! no further program, and the pager ends as soon as nothing uses it. Up it come descriptors to be
//! held. All of them are taken in before the next pager is started: a descriptor that the dead one
//! has sent is as good as held.

use super::{OnEnd, PagerState, Pagers};
use crate::channel::{self, MAX_FDS_PER_LINE, Receiver};
use crate::child::End;
use crate::message::PagerEnd;
use crate::report::DonorAddress;
use crate::restart::CrashLimit;
use hecaton_pager::{Donor, PagerEvent, PagerStart};
use rustix::process::Signal;
use std::io::{self, BufRead, BufReader};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{ChildStdout, Stdio};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

/// The pause after a pager that could not even be started, so that those attempts are not over
/// before whatever keeps the executable from being run has passed.
const START_PAUSE: Duration = Duration::from_millis(400);

impl Pagers {
    /// Runs a pager until it ends in peace, or has nothing to come back for.
    pub(super) fn supervise(
        &self,
        name: &str,
        decided: &SyncSender<Result<u32, String>>,
        on_end: OnEnd,
    ) {
        let mut limit = CrashLimit::default();
        let mut served = false;
        let mut wanted = true;
        let error = loop {
            let listening = |pid| {
                wanted = served || decided.send(Ok(pid)).is_ok();
                served = true;
                wanted
            };
            let (reason, pause) = match self.run_once(name, listening) {
                Ok(End::Exited(0)) => break None,
                Ok(end) if !end.is_crash() => {
                    let own_word = self.with(name, |pager| pager.failure.take()).ok().flatten();
                    break Some(own_word.unwrap_or_else(|| end.to_string()));
                }
                Ok(end) => (end.to_string(), Duration::ZERO),
                Err(error) => (error.to_string(), START_PAUSE),
            };
            let holds = self.with(name, |pager| !pager.held.is_empty()).unwrap_or(false);
            if !holds || !wanted || self.0.stop.is_set() {
                break Some(reason);
            }
            if limit.is_exceeded_by_death(Instant::now()) {
                break Some(format!("{}; at last, {reason}", CrashLimit::REASON));
            }
            tracing::warn!(consumer = name, reason, "pager died; starting another");
            let _ = self.with(name, |pager| {
                pager.report.restarts += 1;
                pager.report.state = PagerState::Starting;
            });
            if self.0.stop.wait(pause) {
                break Some("the node is stopping".to_owned());
            }
        };
        let Some(pager) = self.forget(name) else { return };
        if !served {
            let reason = error.unwrap_or_else(|| "it ended before it listened".to_owned());
            // The launcher may have given up waiting.
            let _ = decided.send(Err(reason));
            return;
        }
        on_end(PagerEnd { name: name.to_owned(), error, stats: pager.report.stats.clone() });
        // Only now: the launcher has been told, and kills what still uses the descriptors.
        drop(pager);
    }

    /// Runs one process to its end. `listening` is told its pid once it listens, and says whether
    /// anybody still wants it.
    fn run_once(&self, name: &str, listening: impl FnOnce(u32) -> bool) -> io::Result<End> {
        let (ours, theirs) = UnixStream::pair()?;
        let stdin = Stdio::from(OwnedFd::from(theirs));
        let mut running = self.0.command.spawn("pager", stdin, Stdio::piped())?;
        let pid = running.pid();
        let group = running.group();
        let output = running.child.stdout.take().expect("its output is a pipe");
        let _ = self.with(name, |pager| {
            pager.group = Some(group);
            pager.report.pid = Some(pid);
            pager.config.donors = self.donors_now();
        });
        // One that died at once takes no start line; how it died, its end says.
        let started =
            self.send_start(name, &ours).and_then(|()| wait_ready(BufReader::new(output)));
        let launch_line = ours.try_clone()?;
        // Before the launcher is told: it may be done with launching at once.
        let _ = self.with(name, |pager| {
            pager.launch_line = Some(launch_line);
            if pager.launch_over {
                pager.hang_up();
                pager.report.state = PagerState::Ending;
            } else if started.is_ok() {
                pager.report.state = PagerState::Serving;
            }
        });
        self.0.news.ring();
        let wanted = started.is_ok() && listening(pid);
        if !wanted || self.0.stop.is_set() {
            group.signal(Signal::TERM);
        }
        self.hold_what_comes(name, ours);
        let end = running.wait();
        let _ = self.with(name, |pager| {
            pager.group = None;
            pager.launch_line = None;
            pager.report.pid = None;
        });
        end
    }

    /// Tells a pager what it is to be, and gives it what the one before it had.
    fn send_start(&self, name: &str, stream: &UnixStream) -> io::Result<()> {
        let start = self.with(name, |pager| {
            let held = pager
                .held
                .iter()
                .map(|(label, fd)| Ok((label.to_owned(), fd.try_clone_to_owned()?)));
            Ok::<_, io::Error>((pager.config.clone(), held.collect::<io::Result<Vec<_>>>()?))
        });
        let (config, held) = start.map_err(io::Error::other)??;
        // The pager reads them as they come, so that they need not fit in the socket.
        channel::send(stream, &PagerStart { config, held: held.len() }, &[])?;
        for held in held.chunks(MAX_FDS_PER_LINE) {
            let labels: Vec<_> = held.iter().map(|(label, _)| label).collect();
            let fds: Vec<_> = held.iter().map(|(_, fd)| fd.as_fd()).collect();
            channel::send(stream, &labels, &fds)?;
        }
        Ok(())
    }

    /// Takes in the descriptors that a pager sends, until it has ended.
    pub(super) fn hold_what_comes(&self, name: &str, stream: UnixStream) {
        let Ok(writing) = stream.try_clone() else { return };
        let mut receiver = Receiver::new(stream);
        let mut take_in = || -> io::Result<bool> {
            let Some(event) = receiver.receive()? else { return Ok(false) };
            let held = match event {
                PagerEvent::HoldFds(labels) => {
                    let fds = receiver.take_fds(labels.len())?;
                    self.with(name, |pager| pager.held.hold(labels, fds))
                }
                PagerEvent::Failed(reason) => self.with(name, |pager| {
                    pager.failure = Some(reason);
                    Ok(())
                }),
                PagerEvent::DropFds(labels) => self.with(name, |pager| {
                    pager.held.drop_labels(&labels);
                    Ok(())
                }),
            };
            held.map_err(io::Error::other)?.map_err(io::Error::other)?;
            Ok(true)
        };
        loop {
            match take_in() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    tracing::error!(consumer = name, %error, "cannot hold what the pager gives");
                    // The pager learns of it when it sends the next.
                    let _ = writing.shutdown(Shutdown::Read);
                    return;
                }
            }
        }
    }

    fn donors_now(&self) -> Vec<Donor> {
        let donors = self.0.donors.all().into_iter();
        let known = |donor: DonorAddress| Donor {
            name: donor.name,
            node: donor.node,
            location: donor.location,
            address: donor.address,
        };
        donors.map(known).collect()
    }
}

/// Reads the line by which a pager says that it listens.
fn wait_ready(mut output: BufReader<ChildStdout>) -> io::Result<()> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    match line.trim_end() {
        "ready" => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
