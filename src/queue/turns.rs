//! The turns of a fair queue's groups, as a claim gives them: a look at the times of all groups in passing, then at what stands first in the lanes of the few
//! that got least, and these are charged as they are taken. See `stint_core::fair`.

use super::config::{Lane, Queue};
use crate::shmem::fair::{self, Seat, Standing};
use crate::shmem::heads::{self, Glimpse};
use crate::shmem::{self, Instance};
use crate::values::Instant;
use stint_core::budget::{Candidate, Limit, State};
use stint_core::fair::{Group, Round};

/// What a task of a lane is charged to its group.
pub fn share(lane: &Lane, tokens: Option<i64>) -> i64 {
    stint_core::fair::charge(tokens, lane.default_tokens)
}

/// How many groups a claim looks at beside one for each task it may take: some turn out to have nothing, or no room.
const SPARE: usize = 1;

/// The turns of one claim.
#[derive(Default)]
pub struct Turns {
    /// The groups that seemed to have something, when the claim began to look, as places in the queue's, and where they stood.
    at_first: Option<Vec<(usize, Standing)>>,
    /// The groups looked at in this round.
    groups: Vec<usize>,
    /// Their places there, by their places in the queue's.
    places: Vec<Option<usize>>,
    /// The time of the first group behind them.
    horizon: f64,
    rounds: u32,
    over: bool,
}

impl Turns {
    /// Whether no lane was left to look at.
    pub fn over(&self) -> bool {
        self.over
    }

    /// Leaves only the lanes of the groups that got least. Returns how many tasks to look at in each of them.
    pub fn choose(&mut self, queue: &Queue, open: &mut Vec<(&Lane, Glimpse)>, max: usize, now: Instant) -> usize {
        let (shared, instance) = (shmem::required(), Instance::here());
        let mut groups: Vec<usize> = open.iter().map(|(lane, _)| lane.group).collect();
        groups.sort_unstable();
        groups.dedup();
        let seats: Vec<&Seat> = groups.iter().map(|group| &queue.groups[*group].seat).collect();
        let standings = fair::glance(shared, instance, queue.number, &queue.floor, &seats, now);
        let mut standings: Vec<(usize, Standing)> = groups.into_iter().zip(standings).collect();
        let wide = max.saturating_add(SPARE).saturating_mul(1 << self.rounds.min(16));
        self.horizon = f64::INFINITY;
        if wide < standings.len() {
            // Of groups that got the same, those that came first: what they are charged moves them on.
            let (_, next, _) = standings.select_nth_unstable_by(wide, |(a, one), (b, other)| one.at.total_cmp(&other.at).then(a.cmp(b)));
            self.horizon = next.1.at;
        }
        self.groups = standings.iter().take(wide).map(|(group, _)| *group).collect();
        self.over = standings.is_empty();
        self.at_first.get_or_insert(standings);
        self.places = vec![None; queue.groups.len()];
        self.groups.iter().enumerate().for_each(|(place, group)| self.places[*group] = Some(place));
        open.retain(|(lane, _)| self.places[lane.group].is_some());
        let depth = (2 * max).div_ceil(self.groups.len().max(1)).saturating_mul(1 << (2 * self.rounds).min(32)).min(max);
        self.rounds += 1;
        depth
    }

    /// What is known of the lanes looked at: the budgets each draws on, and how many of its tasks were seen, `depth` at the most.
    pub fn lanes<'a>(&self, open: &[(&Lane, Glimpse)], draws: &'a [Vec<usize>], seen: &[usize], depth: usize) -> Vec<stint_core::fair::Lane<'a>> {
        let place = |group: usize| self.places[group].unwrap_or_default();
        let known = open.iter().zip(draws).zip(seen);
        known.map(|(((lane, _), draws), seen)| stint_core::fair::Lane { group: place(lane.group), draws, more: *seen >= depth }).collect()
    }

    /// Admits candidates by turns and charges their groups, in one step that no other session sees half done.
    pub fn admit(
        &self,
        queue: &Queue,
        open: &[(&Lane, Glimpse)],
        states: &mut [State],
        limits: &[Limit],
        lanes: &[stint_core::fair::Lane],
        candidates: &[Candidate],
        max: usize,
        now: Instant,
    ) -> Round {
        let costs: Vec<i64> = candidates.iter().map(|candidate| share(open[candidate.lane].0, candidate.tokens)).collect();
        let seats: Vec<(&Seat, f64)> = self.groups.iter().map(|group| (&queue.groups[*group].seat, queue.groups[*group].weight)).collect();
        fair::charge(shmem::required(), Instance::here(), queue.number, &seats, now, |times| {
            let groups: Vec<Group> = times.iter().zip(&seats).map(|(at, (_, weight))| Group { at: *at, weight: *weight }).collect();
            let round = stint_core::fair::admit(states, limits, lanes, &groups, candidates, &costs, max, self.horizon, now.0);
            let charged = round.charged.clone();
            (round, charged)
        })
    }

    /// After a claim that took something: groups that have nothing to claim now go on from the least of those that have. One all of whose lanes were passed by, as
    /// empty or without room, and yielded nothing, is not among these; with `agents` asked for, lanes are passed by that have tasks for others.
    pub fn raise_floor(&self, queue: &Queue, barren: impl Fn(i32) -> bool, agents: bool) {
        let instance = Instance::here();
        let mut left = self.at_first.clone().unwrap_or_default();
        let gone = |group: usize| {
            let mut lanes = queue.lanes.iter().filter(|lane| lane.group == group);
            lanes.all(|lane| if agents { heads::glimpse(instance, lane.lane, &lane.line) == Glimpse::Empty } else { barren(lane.lane) })
        };
        while let Some(least) = (0..left.len()).min_by(|one, other| left[*one].1.firm.total_cmp(&left[*other].1.firm)) {
            let (group, standing) = left.swap_remove(least);
            if !gone(group) {
                fair::raise(&queue.floor, instance, queue.number, standing.firm);
                return;
            }
        }
    }
}

/// Charges a group what its lane yielded in place of what that promised.
pub fn correct(queue: &Queue, lane: &Lane, promised: i64, yielded: i64, now: Instant) {
    if promised != yielded {
        let group = &queue.groups[lane.group];
        fair::charge(shmem::required(), Instance::here(), queue.number, &[(&group.seat, group.weight)], now, |_| {
            ((), vec![yielded.saturating_sub(promised)])
        });
    }
}

/// How many groups that have tasks waiting got less than that of a lane.
pub fn before(queue: &Queue, lane: &Lane, now: Instant) -> usize {
    let instance = Instance::here();
    let waiting = |other: &&Lane| other.group == lane.group || heads::glimpse(instance, other.lane, &other.line) != Glimpse::Empty;
    let mut groups: Vec<usize> = queue.lanes.iter().filter(waiting).map(|lane| lane.group).collect();
    groups.sort_unstable();
    groups.dedup();
    let seats: Vec<&Seat> = groups.iter().map(|group| &queue.groups[*group].seat).collect();
    let standings = fair::glance(shmem::required(), instance, queue.number, &queue.floor, &seats, now);
    let own = groups.iter().zip(&standings).find(|(group, _)| **group == lane.group).map_or(f64::INFINITY, |(_, standing)| standing.at);
    standings.iter().filter(|standing| standing.at < own).count()
}
