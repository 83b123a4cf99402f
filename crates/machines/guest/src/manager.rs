//! The manager's thread: looks at the memory, has the governor decide, and carries out what it
//! says.

use crate::answers::{Answers, View};
use crate::api::{self, Api};
use crate::config::{Application, Config};
use crate::governor::{Action, Governor, Memory};
use crate::port::Port;
use crate::pre_reclaim::{Owed, PreReclaimer};
use crate::sink::Ending;
use crate::state::State;
use crate::worker::{Outcome, Worker};
use axum::Router;
use hecaton_memory::meminfo::{MEMINFO, field_bytes};
use hecaton_vm::guest_port::HostMessage;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fs, io};
use tokio::sync::watch;

/// How often the memory is looked at: a host that has announced nothing takes hundreds of MiB in a
/// second, and who has not given back by the time that nothing is free is killed.
const INTERVAL: Duration = Duration::from_millis(100);

/// How often while applications give back.
const BUSY_INTERVAL: Duration = Duration::from_millis(50);

/// How often while the host could be answered, but for memory that is being readied.
const AWAITED_INTERVAL: Duration = Duration::from_millis(20);

/// Message to the manager's thread.
#[derive(Debug)]
pub(crate) enum News {
    Heard(HostMessage),
    Settled { application: usize, order: u64 },
    Failed { application: usize, order: u64, reason: String },
    Stop,
}

/// A manager that runs.
#[derive(Debug)]
pub struct Manager {
    news: Sender<News>,
    state: watch::Receiver<State>,
    ending: Ending,
    thread: JoinHandle<()>,
}

/// Reads the memory of this machine from `/proc/meminfo`.
pub fn kernel_memory() -> io::Result<Memory> {
    let text = fs::read_to_string(MEMINFO)?;
    let field = |name: &str| {
        field_bytes(&text, name).ok_or_else(|| io::Error::other(format!("{MEMINFO} has no {name}")))
    };
    Ok(Memory { total_bytes: field("MemTotal")?, available_bytes: field("MemAvailable")? })
}

impl Manager {
    /// Begins. `port`: where the host is heard; without it only the memory is watched, which
    /// `memory` reads.
    pub fn start(
        config: Config,
        port: Option<PathBuf>,
        memory: impl FnMut() -> io::Result<Memory> + Send + 'static,
    ) -> io::Result<Manager> {
        let (news, arrivals) = channel();
        let ending = Ending::default();
        let mut workers = Vec::new();
        for (application, one) in config.applications.iter().enumerate() {
            let report = {
                let news = news.clone();
                move |order, outcome| {
                    // Nobody listens once the manager ends.
                    let _ = news.send(match outcome {
                        Outcome::Settled => News::Settled { application, order },
                        Outcome::Failed(reason) => News::Failed { application, order, reason },
                    });
                }
            };
            let sink = one.sink(&ending);
            let worker = sink.map(|sink| Worker::start(&one.bounds.name, sink, report));
            workers.push(worker.transpose()?);
        }
        let port = port.map(|path| {
            let news = news.clone();
            Port::start(path, move |message| news.send(News::Heard(message)).is_ok())
        });
        let pre_reclaimer = (config.pre_reclaim_bytes > 0)
            .then(|| PreReclaimer::start(config.pre_reclaim_bytes, Path::new("/")));
        let kinds: Vec<_> = config.applications.iter().map(Application::kind).collect();
        let names = config.applications.iter().map(|one| one.bounds.name.clone()).collect();
        let bounds = config.applications.into_iter().map(|one| one.bounds).collect();
        let governor = Governor::new(config.settings, bounds);
        // Requests before the first step already see the applications.
        let (publish, state) = watch::channel(governor.state(0, &kinds, Duration::ZERO));
        let keeper = Keeper {
            governor,
            names,
            kinds,
            workers,
            port: port.transpose()?.unwrap_or_default(),
            pre_reclaimer: pre_reclaimer.transpose()?,
            answers: Answers::default(),
            begun: Instant::now(),
            publish,
        };
        let thread = thread::Builder::new().name("guest".into());
        let thread = thread.spawn(move || keeper.run(&arrivals, memory))?;
        Ok(Manager { news, state, ending, thread })
    }

    /// The routes of its API; see `docs/harvesting.md`.
    pub fn router(&self) -> Router {
        api::router(Api { state: self.state.clone(), news: self.news.clone() })
    }

    /// How it stands.
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Ends. Applications keep the limits that they were told.
    pub fn stop(self) {
        self.ending.set();
        // It ends by nothing else.
        let _ = self.news.send(News::Stop);
        // One that panicked has said so on stderr already.
        let _ = self.thread.join();
    }
}

/// All that the thread has.
struct Keeper {
    governor: Governor,
    names: Vec<String>,
    kinds: Vec<&'static str>,
    workers: Vec<Option<Worker>>,
    port: Port,
    pre_reclaimer: Option<PreReclaimer>,
    answers: Answers,
    begun: Instant,
    publish: watch::Sender<State>,
}

impl Keeper {
    fn run(mut self, arrivals: &Receiver<News>, mut memory: impl FnMut() -> io::Result<Memory>) {
        loop {
            let memory = match &mut self.pre_reclaimer {
                Some(pre_reclaimer) => pre_reclaimer.with_readied(&mut memory),
                None => memory().map(|memory| (memory, 0)),
            };
            match memory {
                Ok((memory, readied_bytes)) => self.step(memory, readied_bytes),
                Err(error) => tracing::error!(%error, "the memory cannot be read"),
            }
            let wait = if self.answers.are_awaited() {
                AWAITED_INTERVAL
            } else if self.governor.is_busy() {
                BUSY_INTERVAL
            } else {
                INTERVAL
            };
            let first = match arrivals.recv_timeout(wait) {
                Ok(news) => Some(news),
                Err(RecvTimeoutError::Timeout) => None,
                // Nobody is left who could stop it.
                Err(RecvTimeoutError::Disconnected) => return,
            };
            for news in first.into_iter().chain(arrivals.try_iter()) {
                if matches!(news, News::Stop) {
                    self.workers.iter_mut().flatten().for_each(Worker::close);
                    return;
                }
                self.take(news);
            }
        }
    }

    fn take(&mut self, news: News) {
        match news {
            News::Heard(message) => {
                tracing::info!(?message, "the host says");
                self.governor.hear(&message, self.begun.elapsed());
            }
            News::Settled { application, order } => self.governor.settled(application, order),
            News::Failed { application, order, reason } => {
                let name = &self.names[application];
                tracing::warn!(application = name, order, reason, "an application is not told");
                self.governor.failed(application, order, reason);
            }
            News::Stop => {}
        }
    }

    fn step(&mut self, memory: Memory, readied_bytes: u64) {
        let now = self.begun.elapsed();
        for action in self.governor.step(memory, now) {
            match action {
                Action::Tell { application, order } => {
                    let name = &self.names[application];
                    tracing::info!(application = name, ?order, "an application is told");
                    if let Some(worker) = &self.workers[application] {
                        worker.tell(order);
                    }
                }
                Action::Answer(message) => self.answers.keep(message, now),
            }
        }
        let (announced, free_bytes) = (self.governor.announced(), self.governor.free_bytes());
        let view = match &self.pre_reclaimer {
            Some(pre_reclaimer) => {
                let announced_bytes = announced.map(|announced| announced.owed_bytes);
                pre_reclaimer.owes(Owed { announced_bytes, free_bytes });
                // For more than that the driver would work itself, and hold up the readying.
                let takeable_bytes = readied_bytes;
                View { announced, takeable_bytes, is_readied: pre_reclaimer.is_done() }
            }
            None => {
                let takeable_bytes = memory.available_bytes.saturating_sub(free_bytes);
                View { announced, takeable_bytes, is_readied: true }
            }
        };
        for message in self.answers.due(&view, now) {
            tracing::info!(?message, "the host is told");
            self.port.say(&message);
        }
        let (governor, kinds) = (&self.governor, &self.kinds);
        self.publish.send_modify(|shown| {
            let state = State { readied_bytes, ..governor.state(shown.version, kinds, now) };
            let version = shown.version + u64::from(!state.is_like(shown));
            *shown = State { version, ..state };
        });
    }
}
