//! One virtual machine of a bench, and the conversation with what runs in it.

pub(in crate::bench) mod kit;
mod overlay;

pub(in crate::bench) use overlay::program as program_in_guest;

use crate::bench::app::Setup;
use crate::bench::program::guest::{Answer, Request, Touched};
use crate::bench::world::cluster::Cluster;
use crate::bench::world::process::{Guarded, Lines, NextLine};
use anyhow::{Context as _, bail};
use kit::Kit;
use std::{
    ffi::OsString,
    fs,
    io::Write as _,
    ops::Range,
    path::{Path, PathBuf},
    process::{ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};

/// How long a guest may take to come up.
const BOOT: Duration = Duration::from_secs(180);

/// How long it may take for anything that has no limit of its own.
const PATIENCE: Duration = Duration::from_secs(600);

/// Backing of a machine's memory.
pub(in crate::bench) enum Memory<'a> {
    /// All of it is this host's.
    Plain,
    /// So too, but in a memory file, of small pages, as guests with a pool have it.
    File,
    /// A memory cgroup, and swap.
    Limited(Box<Setup<'a>>),
    /// So many bytes are this host's, and the rest is in the pool.
    Pool { cluster: &'a Cluster, local: u64 },
    /// As plain, and QEMU and the guest's kernel are told more.
    Told { qemu: Vec<OsString>, kernel: String },
    /// The launcher's command line precedes QEMU's, as with `hecaton vm create`; the guest's kernel
    /// is told more.
    Created { launcher: Vec<OsString>, kernel: String },
}

/// A machine that is ended when it goes out of scope.
pub(in crate::bench) struct Machine<'a> {
    pub(in crate::bench) name: String,
    input: ChildStdin,
    output: Lines,
    console: PathBuf,
    complaints: PathBuf,
    /// Before the memory that it has.
    process: Guarded,
    pub(in crate::bench) memory: Memory<'a>,
}

impl<'a> Machine<'a> {
    /// Starts one; it comes up by itself meanwhile.
    pub(in crate::bench) fn start(
        kit: &Kit,
        name: &str,
        bytes: u64,
        memory: Memory<'a>,
        dir: &Path,
    ) -> anyhow::Result<Self> {
        let console = dir.join(format!("{name}.console"));
        let kernel = match &memory {
            Memory::Told { kernel, .. } | Memory::Created { kernel, .. } => kernel.as_str(),
            _ => "",
        };
        let own_bytes = (!matches!(memory, Memory::Created { .. })).then_some(bytes);
        let words = kit.command_line(own_bytes, &console, kernel);
        let (qemu, arguments) = words.split_first().context("an empty command line")?;
        let mut command = match &memory {
            Memory::Plain | Memory::File | Memory::Told { .. } => Command::new(qemu),
            Memory::Limited(setup) => setup.command(qemu),
            Memory::Pool { cluster, local } => {
                let mut command = cluster.run_machine(name, bytes, *local)?;
                command.arg(qemu);
                command
            }
            Memory::Created { launcher, .. } => {
                let (program, rest) = launcher.split_first().context("an empty command line")?;
                let mut command = Command::new(program);
                command.args(rest).arg(qemu);
                command
            }
        };
        let complaints = dir.join(format!("{name}.complaints"));
        let file = fs::File::create(&complaints)
            .with_context(|| format!("cannot make {}", complaints.display()))?;
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file);
        if matches!(memory, Memory::File) {
            let backend = format!("memory-backend-memfd,id=ram,share=on,size={bytes}");
            command.args(["-object", &backend, "-machine", "memory-backend=ram"]);
        }
        if let Memory::Told { qemu, .. } = &memory {
            command.args(qemu);
        }
        let mut process = Guarded::spawn(&mut command)?;
        let (input, output) = (process.input()?, process.lines()?);
        Ok(Self { name: name.to_owned(), input, output, console, complaints, process, memory })
    }

    /// Waits until it does what it is asked.
    pub(in crate::bench) fn wait_up(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + BOOT;
        loop {
            match self.output.next_before(deadline)? {
                // Before its greeting, the line may carry anything.
                NextLine::Line(line) => match serde_json::from_str(&line) {
                    Ok(Answer::Done) => return Ok(()),
                    _ => tracing::debug!(guest = self.name, line, "before the greeting"),
                },
                _ => bail!("the guest `{}` does not come up: {}", self.name, self.last_words()),
            }
        }
    }

    /// QEMU's process, if it was started without `hecaton vm run`.
    pub(in crate::bench) fn own_process(&self) -> u32 {
        self.process.id()
    }

    /// Has something done, within `patience`; nothing if it takes longer.
    pub(in crate::bench) fn try_ask(
        &mut self,
        request: &Request,
        patience: Duration,
    ) -> anyhow::Result<Option<Answer>> {
        self.say(request)?;
        match self.output.next_before(Instant::now() + patience)? {
            NextLine::Late => Ok(None),
            NextLine::End => bail!("the guest `{}` has ended: {}", self.name, self.last_words()),
            NextLine::Line(line) => {
                let answer = serde_json::from_str(&line)
                    .with_context(|| format!("the guest `{}` says {line:?}", self.name))?;
                if let Answer::Failed(reason) = answer {
                    bail!("in the guest `{}`: {reason}", self.name);
                }
                Ok(Some(answer))
            }
        }
    }

    fn ask(&mut self, request: &Request) -> anyhow::Result<Answer> {
        let answer = self.try_ask(request, PATIENCE)?;
        answer.with_context(|| {
            format!("the guest `{}` has not answered {request:?} in time", self.name)
        })
    }

    fn say(&mut self, request: &Request) -> anyhow::Result<()> {
        writeln!(self.input, "{}", serde_json::to_string(request)?)
            .with_context(|| format!("the guest `{}` has ended: {}", self.name, self.last_words()))
    }

    /// Has something done of which there is nothing to tell.
    pub(in crate::bench) fn perform(&mut self, request: &Request) -> anyhow::Result<()> {
        match self.ask(request)? {
            Answer::Done => Ok(()),
            other => Err(self.misunderstood(&other)),
        }
    }

    /// Has a shell do something; what it has said.
    pub(in crate::bench) fn shell(&mut self, script: &str) -> anyhow::Result<String> {
        match self.ask(&Request::Shell(script.to_owned()))? {
            Answer::Said(text) => Ok(text),
            other => Err(self.misunderstood(&other)),
        }
    }

    pub(in crate::bench) fn available_bytes(&mut self) -> anyhow::Result<u64> {
        match self.ask(&Request::Available)? {
            Answer::Available(bytes) => Ok(bytes),
            other => Err(self.misunderstood(&other)),
        }
    }

    pub(in crate::bench) fn touch(&mut self, samples: u64) -> anyhow::Result<Touched> {
        match self.ask(&Request::Touch { samples })? {
            Answer::Touched(touched) => Ok(touched),
            other => Err(self.misunderstood(&other)),
        }
    }

    /// Seconds that the queries took.
    pub(in crate::bench) fn query(&mut self, keys: Range<u64>, count: u64) -> anyhow::Result<f64> {
        match self.ask(&Request::Query { keys, count })? {
            Answer::Queried { seconds } => Ok(seconds),
            other => Err(self.misunderstood(&other)),
        }
    }

    /// Pages in a second that a storm has written to, until now.
    pub(in crate::bench) fn calm(&mut self) -> anyhow::Result<f64> {
        match self.ask(&Request::Calm)? {
            Answer::Stormed { pages, seconds } => Ok(pages as f64 / seconds),
            other => Err(self.misunderstood(&other)),
        }
    }

    fn misunderstood(&self, answer: &Answer) -> anyhow::Error {
        anyhow::anyhow!("the guest `{}` answers {answer:?}", self.name)
    }

    /// The memory that stays here, from now on.
    pub(in crate::bench) fn resize_local(&mut self, bytes: u64) -> anyhow::Result<()> {
        let Memory::Pool { cluster, local } = &mut self.memory else {
            bail!("`{}` has no memory in a pool", self.name);
        };
        cluster.node()?.resize_local(&self.name, bytes)?;
        *local = bytes;
        Ok(())
    }

    /// Returns the last lines of QEMU and of the guest's kernel, at most three of each.
    pub(in crate::bench) fn last_words(&self) -> String {
        let last = |path: &Path| {
            let text = fs::read(path).unwrap_or_default();
            let text = String::from_utf8_lossy(&text).into_owned();
            let lines: Vec<_> =
                text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
            lines[lines.len().saturating_sub(3)..].join("; ")
        };
        let said = [last(&self.complaints), last(&self.console)];
        let said: Vec<_> = said.into_iter().filter(|text| !text.is_empty()).collect();
        if said.is_empty() { "it has said nothing".to_owned() } else { said.join("; ") }
    }
}
