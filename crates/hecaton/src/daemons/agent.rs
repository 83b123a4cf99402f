//! The arguments of a node's agent, which divides its host's memory.

use crate::terminal::failure::usage;
use hecaton_broker::Settings;
use hecaton_memory::Size;
use hecaton_node::agent::AgentConfig;
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of the agent.
#[derive(clap::Args)]
pub(crate) struct AgentArgs {
    /// Has harvest VMs, and what --lend lends, use the memory of this host that no regular virtual
    /// machine has, and give it back before one misses it; machines are started with `hecaton vm
    /// create`
    #[arg(long, requires = "qmp_dir")]
    agent: bool,
    /// The directory of the machines' monitors, which is made if need be; no other agent may have
    /// it
    #[arg(long, value_name = "DIR", requires = "agent")]
    qmp_dir: Option<PathBuf>,
    /// Has the domains of libvirt on this host take part, at this connection, as virsh knows it:
    /// qemu:///system. Those that `hecaton vm libvirt --harvest` has made harvest VMs grow and
    /// shrink, all others are regular machines
    #[arg(long, value_name = "URI", requires = "agent")]
    libvirt: Option<String>,
    /// Free memory that nobody harvests, so that regular machines start without waiting
    #[arg(long, value_name = "SIZE", default_value = "0", requires = "agent")]
    buffer: Size,
    /// Has each NUMA node of the host keep an equal part of the buffer free, so that regular
    /// machines find their memory within one node; otherwise the first nodes keep all of it
    #[arg(
        long,
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_value_t = true,
        default_missing_value = "true",
        action = clap::ArgAction::Set,
        requires = "agent"
    )]
    numa_balance: bool,
    /// The most of this host's memory that machines and donors have together; the rest is left to
    /// other programs [default: all that those do not have]
    #[arg(long, value_name = "SIZE", requires = "agent")]
    manage: Option<Size>,
    /// The most of this host's cores that machines have together [default: those that this node may
    /// run on]
    #[arg(long, value_name = "NUMBER", requires = "agent")]
    manage_cores: Option<u32>,
    /// The most that a machine is asked to give back at once; 0 for all at once
    #[arg(long, value_name = "SIZE", default_value = "1G", requires = "agent")]
    batch: Size,
    /// Has one harvest VM give back at a time, to measure what it brings that several do
    #[arg(long, requires = "agent")]
    one_at_a_time: bool,
    /// Takes memory without telling the managers inside harvest VMs beforehand, to measure what
    /// that brings; evictions are told of all the same
    #[arg(long, requires = "agent")]
    unannounced: bool,
    /// How long the agent waits for the manager inside a harvest VM to give memory back before it
    /// takes the memory all the same; half of --reclaim-patience at most
    #[arg(long, value_name = "SECONDS", default_value_t = 2, requires = "agent")]
    guest_patience: u64,
    /// How long a harvest VM may give nothing back, while a regular machine waits for it, before it
    /// is evicted
    #[arg(long, value_name = "SECONDS", default_value_t = 5, requires = "agent")]
    reclaim_patience: u64,
    /// How long it may take to give back what a regular machine waits for, before it is evicted
    #[arg(long, value_name = "SECONDS", default_value_t = 30, requires = "agent")]
    reclaim_time: u64,
    /// How long ahead a harvest VM is warned whose minimum a regular machine needs; the last two
    /// thirds of it are for its shutting down, and then it is killed
    #[arg(long, value_name = "SECONDS", default_value_t = 30, requires = "agent")]
    eviction_warning: u64,
    /// Most harvest VMs on this host [default: no limit]
    #[arg(long, value_name = "NUMBER", requires = "agent")]
    harvest_quota: Option<usize>,
}

impl AgentArgs {
    /// How the agent is to be, if there is one.
    pub(crate) fn check(&self) -> anyhow::Result<Option<AgentConfig>> {
        // Each of the two needs the other.
        let Some(qmp_dir) = self.qmp_dir.clone().filter(|_| self.agent) else { return Ok(None) };
        let warning = Duration::from_secs(self.eviction_warning);
        let patience = Duration::from_secs(self.reclaim_patience);
        // A guest that gives nothing is not evicted while the agent waits for it.
        let guest_patience = Duration::from_secs(self.guest_patience).min(patience / 2);
        let settings = Settings {
            buffer_bytes: self.buffer.0,
            even_buffer: self.numa_balance,
            batch_bytes: Some(self.batch.0).filter(|bytes| *bytes > 0),
            parallel: !self.one_at_a_time,
            patience,
            reclaim_time: Duration::from_secs(self.reclaim_time),
            warning,
            shut_down: warning * 2 / 3,
            harvest_quota: self.harvest_quota.unwrap_or(usize::MAX),
            ..Settings::default()
        };
        if let Err(error) = settings.check() {
            usage!("{error}");
        }
        Ok(Some(AgentConfig {
            qmp_dir,
            libvirt: self.libvirt.clone(),
            manage_bytes: self.manage.map(|Size(bytes)| bytes),
            manage_cores: self.manage_cores,
            guest_patience: (!self.unannounced).then_some(guest_patience),
            settings,
        }))
    }
}
