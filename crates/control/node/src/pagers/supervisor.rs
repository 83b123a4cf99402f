//! One consumer's pager, process after process.
//!
//! A pager that is killed takes nothing along: the node holds duplicates of its descriptors
//! ([`crate::children::held`]), so the consumer's faults wait, and the next pager takes them over
//! and answers them. Hence the rule: while descriptors are held, a pager that was killed is started
//! again at once, as often as [`CrashLimit`] allows. One that ends by itself means it: its consumer
//! has ended, or cannot go on.
//!
//! A pager's standard input is a socket. Down it go the configuration and what the pager before it
//! had handed over, and at last that the launcher will start no further program: then the pager
//! ends as soon as nothing uses it. Up it come descriptors to be held. All of them are taken in
//! before the next pager is started: a descriptor that the dead one has sent is as good as held.

use super::{LastWord, PagerState, Pagers};
use crate::channel::{self, MAX_FDS_PER_LINE, Receiver};
use crate::children::child::{Conversation, End, Running};
use crate::children::restart::CrashLimit;
use crate::cluster::report::DonorAddress;
use crate::socket::message::PagerEnd;
use hecaton_pager::{Donor, PagerEvent, PagerStart};
use rustix::process::Signal;
use std::io::{self, BufRead, BufReader};
use std::mem;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{ChildStdout, Stdio};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

/// The pause after a pager that could not even be started, so that those attempts are not over
/// before whatever keeps the executable from being run has passed.
const START_PAUSE: Duration = Duration::from_millis(400);

/// Meaning of a process's end for its consumer.
#[derive(Debug, PartialEq, Eq)]
enum Meaning {
    /// All was released.
    Peace,
    /// It cannot go on, and why.
    Failure(String),
    /// It did not mean to end.
    Crash(String),
}

/// The exit status of an adopted process is unknown, so its last message decides.
fn meaning(end: End, said: LastWord) -> Meaning {
    match (end, said) {
        (End::Exited(0), _) | (End::Unknown, LastWord::Peace) => Meaning::Peace,
        (End::Unknown, LastWord::Failure(why)) => Meaning::Failure(why),
        (end, _) if end.is_crash() => Meaning::Crash(end.to_string()),
        (_, LastWord::Failure(why)) => Meaning::Failure(why),
        (end, _) => Meaning::Failure(end.to_string()),
    }
}

impl Pagers {
    /// Runs a pager until it ends in peace, or has nothing to come back for. The first of its
    /// processes may run already.
    pub(super) fn supervise(
        &self,
        name: &str,
        mut running: Option<Conversation>,
        decided: &SyncSender<Result<u32, String>>,
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
            let end = self.run_once(name, running.take(), listening);
            let said = self.with(name, |pager| mem::take(&mut pager.last_word)).unwrap_or_default();
            let (reason, pause) = match end.map(|end| meaning(end, said)) {
                Ok(Meaning::Peace) => break None,
                Ok(Meaning::Failure(why)) => break Some(why),
                Ok(Meaning::Crash(how)) => (how, Duration::ZERO),
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
        let Some(mut pager) = self.forget(name) else { return };
        if !served {
            let reason = error.unwrap_or_else(|| "it ended before it listened".to_owned());
            // The launcher may have given up waiting.
            let _ = decided.send(Err(reason));
            return;
        }
        let stats = pager.report.stats.clone();
        match (pager.launcher.0.take(), error) {
            (Some(on_end), error) => on_end(PagerEnd { name: name.to_owned(), error, stats }),
            (None, Some(error)) => tracing::error!(consumer = name, error, "pager ended"),
            (None, None) => {}
        }
        // Only now: the launcher has been told, and kills what still uses the descriptors.
        drop(pager);
    }

    /// Starts a process; whether it listens is the second value.
    fn start_process(&self, name: &str) -> io::Result<(Conversation, io::Result<()>)> {
        let (ours, theirs) = UnixStream::pair()?;
        let receiver = Receiver::new(ours.try_clone()?);
        let stdin = Stdio::from(OwnedFd::from(theirs));
        let mut process = self.0.command.spawn("pager", stdin, Stdio::piped())?;
        let output = process.child.stdout.take().expect("its output is a pipe");
        let child = Conversation { process: Running::Started(process), stream: ours, receiver };
        let _ = self.with(name, |pager| {
            pager.enter(&child.process);
            let before = mem::take(&mut pager.config.donors);
            pager.config.donors = match pager.held.is_empty() {
                true => Self::donors(self.0.donors.all()),
                // A donor that is no longer listed may hold pages of the process before it.
                false => Donor::joined(Self::donors(self.0.donors.ever()), before),
            };
        });
        // One that died at once takes no start line; how it died, its end says.
        let started =
            self.send_start(name, &child.stream).and_then(|()| wait_ready(BufReader::new(output)));
        Ok((child, started))
    }

    /// Runs one process to its end, which may have been started before. `listening` is told its pid
    /// once it listens, and says whether anybody still wants it.
    fn run_once(
        &self,
        name: &str,
        running: Option<Conversation>,
        listening: impl FnOnce(u32) -> bool,
    ) -> io::Result<End> {
        let (child, started) = match running {
            Some(child) => (child, Ok(())),
            None => self.start_process(name)?,
        };
        let Conversation { process, stream, receiver } = child;
        let launch_line = stream.try_clone()?;
        // Before the launcher is told: it may be done with launching at once.
        let _ = self.with(name, |pager| {
            pager.launch_line = Some(launch_line);
            if pager.launch_over {
                pager.say_launch_over();
                pager.report.state = PagerState::Ending;
            } else if started.is_ok() {
                pager.report.state = PagerState::Serving;
            }
        });
        self.0.news.ring();
        let wanted = started.is_ok() && listening(process.pid());
        if !wanted || self.0.stop.is_set() {
            process.target().signal(Signal::TERM);
        }
        self.hold_what_comes(name, &stream, receiver);
        let end = process.wait();
        let _ = self.with(name, |pager| {
            pager.target = None;
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
    pub(super) fn hold_what_comes(&self, name: &str, stream: &UnixStream, mut receiver: Receiver) {
        let mut take_in = || -> io::Result<bool> {
            let Some(event) = receiver.receive()? else { return Ok(false) };
            let held = match event {
                PagerEvent::HoldFds(labels) => {
                    let fds = receiver.take_fds(labels.len())?;
                    self.with(name, |pager| pager.held.hold(labels, fds))
                }
                PagerEvent::Failed(reason) => self.with(name, |pager| {
                    pager.last_word = LastWord::Failure(reason);
                    Ok(())
                }),
                PagerEvent::Over => self.with(name, |pager| {
                    pager.last_word = LastWord::Peace;
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
                    let _ = stream.shutdown(Shutdown::Read);
                    return;
                }
            }
        }
    }

    fn donors(donors: Vec<DonorAddress>) -> Vec<Donor> {
        let known = |donor: DonorAddress| Donor {
            name: donor.name,
            node: donor.node,
            location: donor.location,
            address: donor.address,
        };
        donors.into_iter().map(known).collect()
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

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn ends_are_told_apart_by_status_and_by_what_was_said() {
        let failure = || LastWord::Failure("no memory".to_owned());
        let failed = || Meaning::Failure("no memory".to_owned());
        assert_eq!(meaning(End::Exited(0), LastWord::None), Meaning::Peace);
        assert_eq!(meaning(End::Exited(1), failure()), failed());
        assert!(matches!(meaning(End::Exited(3), LastWord::None), Meaning::Failure(_)));
        for end in [End::Killed(9), End::Exited(hecaton_pager::PANICKED)] {
            for said in [LastWord::None, LastWord::Peace, failure()] {
                assert!(matches!(meaning(end, said), Meaning::Crash(_)), "{end}");
            }
        }
        assert_eq!(meaning(End::Unknown, LastWord::Peace), Meaning::Peace);
        assert_eq!(meaning(End::Unknown, failure()), failed());
        assert!(matches!(meaning(End::Unknown, LastWord::None), Meaning::Crash(_)));
    }
}
