//! One volume's process after another.

use super::tables::LockedTables;
use super::{
    Copying, Deletion, Exported, Handing, Process, Resizing, Volume, VolumeEvent, VolumeOrder,
    VolumeStart, VolumeState, Volumes,
};
use crate::channel::{self, Receiver};
use crate::children::child::{Conversation, End, Running};
use crate::children::restart::Backoff;
use rustix::process::Signal;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Instant;

/// A process's last message on its end. `None` if it was killed: then another process serves the
/// volume.
enum LastWord {
    None,
    Released,
    /// Another node has what it served.
    Taken,
    Failed(String),
}

impl Volumes {
    /// Runs a volume's processes, the first of which may be there already, until it is deleted or
    /// the node stops. One that never served is not started again.
    pub(super) fn supervise(&self, name: &str, mut running: Option<Conversation>) {
        let (mut backoff, mut tables) = (Backoff::default(), LockedTables::default());
        loop {
            let born = Instant::now();
            let (was_released, reason) = match self.run_once(name, running.take(), &mut tables) {
                Ok((_, LastWord::Released)) => (true, "it was told to end".to_owned()),
                Ok((_, LastWord::Taken)) => (true, "another node has taken it over".to_owned()),
                Ok((_, LastWord::Failed(reason))) => (false, reason),
                Ok((end, LastWord::None)) => (false, end.to_string()),
                Err(error) => (false, format!("cannot run it: {error}")),
            };
            let goes_on = self.with(name, |volume| {
                volume.report.last_error = Some(reason.clone());
                volume.report.state = VolumeState::Starting;
                volume.has_served && !was_released
            });
            // One that never served is forgotten by whoever wants it created, with the reason.
            let has_served = self.with(name, |volume| volume.has_served).unwrap_or(false);
            if !goes_on.unwrap_or(false) || self.0.stop.is_set() {
                if has_served || self.0.stop.is_set() {
                    self.forget(name);
                }
                return;
            }
            tracing::warn!(volume = name, reason, "a volume's process ended; starting it again");
            let _ = self.with(name, |volume| volume.report.restarts += 1);
            if self.0.stop.wait(backoff.after_death(born.elapsed())) {
                return self.forget(name);
            }
        }
    }

    /// Runs one process to its end, which may be there already, and tells it with the process's own
    /// word on why.
    fn run_once(
        &self,
        name: &str,
        running: Option<Conversation>,
        tables: &mut LockedTables,
    ) -> io::Result<(End, LastWord)> {
        let is_new = running.is_none();
        let Conversation { process, stream, receiver } = match running {
            Some(running) => running,
            None => {
                let (ours, theirs) = UnixStream::pair()?;
                let stdin = Stdio::from(OwnedFd::from(theirs));
                let process = self.0.command.spawn("volume-server", stdin, Stdio::null())?;
                let receiver = Receiver::new(ours.try_clone()?);
                Conversation { process: Running::Started(process), stream: ours, receiver }
            }
        };
        let (pid, target) = (process.pid(), process.target());
        let started = self.with(name, |volume| {
            if is_new {
                self.send_start(volume, &stream);
            }
            // Orders come after the start, and none is missed in between.
            volume.report.pid = Some(pid);
            volume.told_word = None;
            volume.process = Some(Process { stream, target: target.clone() });
            match volume.deletion {
                Deletion::Asked => volume.order(&VolumeOrder::Delete, None),
                Deletion::No | Deletion::Refused(_) => {}
            }
            if self.0.stop.is_set() {
                volume.order(&VolumeOrder::End, None);
            }
        });
        let conversation = match started {
            Ok(()) => self.converse(name, receiver, tables),
            Err(_) => Err(io::Error::other("the volume is not wanted any more")),
        };
        if conversation.is_err() {
            target.signal(Signal::KILL);
        }
        let end = process.wait();
        let _ = self.with(name, |volume| {
            volume.process = None;
            volume.report.pid = None;
            if let Copying::Asked = volume.copying {
                volume.copying = Copying::Refused("its process ended; try again".to_owned());
            }
            volume.unexporting_is_over();
            if volume.handing == Handing::Asked {
                volume.handing = Handing::Refused("its process ended; try again".to_owned());
            }
            if let Resizing::Asked(_) = volume.resizing {
                let reason = "its process ended; `hecaton volume status` tells its size";
                volume.resizing = Resizing::Refused(reason.to_owned());
            }
        });
        Ok((end?, conversation?))
    }

    /// Tells a process what it is to serve, and gives it what the one before it had.
    fn send_start(&self, volume: &mut Volume, stream: &UnixStream) {
        volume.entrances.retain_mut(|entrance| {
            let address = entrance.address();
            let is_it = |export: &&Exported| export.address == address;
            let over_uring = volume.report.exports.iter().find(is_it).is_some_and(|it| it.uring);
            let Err(error) = entrance.succeed(over_uring) else { return true };
            tracing::error!(volume = volume.config.name, %address, %error, "an export is gone");
            volume.report.exports.retain(|export| export.address != address);
            false
        });
        volume.told = match volume.held.is_empty() {
            true => self.0.donors.all(),
            // A donor that is no longer listed may hold pages of the process before it.
            false => self.0.donors.ever(),
        };
        let start = VolumeStart {
            config: volume.config.clone(),
            donors: volume.told.clone(),
            exports: volume.report.exports.clone(),
            labels: volume.held.iter().map(|(label, _)| label.to_owned()).collect(),
            restarts: volume.report.restarts,
            outlive: self.outlive(volume.number),
            detached: volume.report.detached.clone(),
        };
        let entrances = volume.entrances.iter().map(AsFd::as_fd);
        let fds: Vec<_> = entrances.chain(volume.held.iter().map(|(_, fd)| fd)).collect();
        if let Err(error) = channel::send(stream, &start, &fds) {
            // It died at once; how, its exit status says.
            tracing::debug!(%error, "a volume's process took no start line");
        }
    }

    /// Listens to a process until it closes its end, which it does by ending.
    fn converse(
        &self,
        name: &str,
        mut receiver: Receiver,
        tables: &mut LockedTables,
    ) -> io::Result<LastWord> {
        let mut last_word = LastWord::None;
        while let Some(event) = receiver.receive()? {
            let fds = match &event {
                VolumeEvent::HoldFds(labels) => receiver.take_fds(labels.len())?,
                VolumeEvent::Snapshot => receiver.take_fds(1)?,
                _ => Vec::new(),
            };
            let has_tables = matches!(event, VolumeEvent::Serving | VolumeEvent::Resized);
            let taken = self.with(name, |volume| {
                match event {
                    VolumeEvent::HoldFds(labels) => return volume.held.hold(labels, fds),
                    VolumeEvent::Serving => {
                        volume.has_served = true;
                        volume.report.state = VolumeState::Serving;
                        self.0.news.ring();
                    }
                    VolumeEvent::Stats(stats) => {
                        volume.report.size_bytes = stats.size_bytes;
                        volume.report.stats = Some(*stats);
                        volume.tell_word();
                        let donors = self.0.donors.all();
                        if volume.told != donors {
                            volume.order(&VolumeOrder::Donors(donors.clone()), None);
                            volume.told = donors;
                        }
                    }
                    VolumeEvent::WithoutUring(address) => {
                        let exports = volume.report.exports.iter_mut();
                        exports
                            .filter(|export| export.address == address)
                            .for_each(|export| export.uring = false);
                    }
                    VolumeEvent::Unexported => volume.unexported(Ok(())),
                    VolumeEvent::NotUnexported(attached) => volume.unexported(Err(attached)),
                    VolumeEvent::Resized => {
                        if let Resizing::Asked(bytes) = volume.resizing {
                            volume.report.size_bytes = bytes;
                            volume.resizing = Resizing::Done;
                        }
                    }
                    VolumeEvent::NotResized(reason) => {
                        if let Resizing::Asked(_) = volume.resizing {
                            volume.resizing = Resizing::Refused(reason);
                        }
                    }
                    // Nobody waits for it any more: its memory is given back when its lease ends.
                    VolumeEvent::Snapshot => {
                        if let (Copying::Asked, Some(tables)) =
                            (&volume.copying, fds.into_iter().next())
                        {
                            volume.copying = Copying::Done(tables);
                        }
                    }
                    VolumeEvent::NoSnapshot(reason) => {
                        if let Copying::Asked = volume.copying {
                            volume.copying = Copying::Refused(reason);
                        }
                    }
                    VolumeEvent::Detached(offer) => {
                        volume.report.detached = Some(offer);
                        volume.handed(Handing::Done);
                        self.0.news.ring();
                    }
                    VolumeEvent::Kept => {
                        volume.report.detached = None;
                        volume.handed(Handing::Done);
                        self.0.news.ring();
                    }
                    VolumeEvent::NotDetached(reason) | VolumeEvent::NotKept(reason) => {
                        volume.handed(Handing::Refused(reason));
                    }
                    VolumeEvent::Taken => {
                        tracing::info!(volume = name, "another node has the volume now");
                        last_word = LastWord::Taken;
                        volume.report.state = VolumeState::Ending;
                        volume.order(&VolumeOrder::End, None);
                    }
                    VolumeEvent::InUse(clients) if volume.deletion == Deletion::Asked => {
                        volume.deletion = Deletion::Refused(clients);
                    }
                    VolumeEvent::InUse(_) => {}
                    // That of one which another node has taken over is said.
                    VolumeEvent::Released | VolumeEvent::Failed(_)
                        if matches!(last_word, LastWord::Taken) => {}
                    VolumeEvent::Released => last_word = LastWord::Released,
                    VolumeEvent::Failed(reason) => last_word = LastWord::Failed(reason),
                }
                Ok(())
            });
            taken.map_err(io::Error::other)?.map_err(io::Error::other)?;
            if has_tables {
                self.lock_tables(name, tables);
            }
        }
        Ok(last_word)
    }
}
