//! Whose turn it is on a queue that is shared by groups: start-time fair queueing. Each group has a time of its own, the tokens it has got divided by its
//! weight, and the group with the least has the next turn; what it is charged moves its time on. So over any span in which two groups both have tasks waiting
//! and room to run, what they get in tokens by weight differs by no more than one task of each, and one for every worker that claims at the same time.
//!
//! A group that had nothing to claim for a while does not save up turns: it goes on from the least time of those that had, the queue's floor.

use crate::budget::{Candidate, Limit, State};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// What a task without a prediction is charged until its attempt reports what it used, where none of its budgets has a default.
pub const UNPREDICTED: i64 = 1000;

/// What a task is charged when it is claimed: its prediction, or a default; never nothing, so that tasks without predictions take turns.
pub fn charge(predicted: Option<i64>, default: Option<i64>) -> i64 {
    predicted.filter(|tokens| *tokens > 0).or(default.filter(|tokens| *tokens > 0)).unwrap_or(UNPREDICTED)
}

/// Tokens as time of a group of this weight.
pub fn time(tokens: i64, weight: f64) -> f64 {
    tokens as f64 / weight
}

/// A group with a claimable task, in the order of the lanes.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// Its time.
    pub at: f64,
    /// Its weight.
    pub weight: f64,
}

/// What is known of a lane.
#[derive(Clone, Copy, Debug)]
pub struct Lane<'a> {
    /// Its group, an index.
    pub group: usize,
    /// The budgets it draws on, as indices.
    pub draws: &'a [usize],
    /// Whether it may have more tasks than are among the candidates.
    pub more: bool,
}

/// What came of a round.
#[derive(Debug, Default, PartialEq)]
pub struct Round {
    /// The candidates that were admitted, in the order of their turns.
    pub admitted: Vec<usize>,
    /// The first candidate of each lane that found no room.
    pub refused: Vec<usize>,
    /// What each group is charged.
    pub charged: Vec<i64>,
}

/// Admits at most `max` candidates by turns, and adds what they reserve to `states`. Candidates of one group are tried in their order, each costs `costs[i]`;
/// a lane is passed over from its first task that finds no room, and a group without room by the others. No turn but the first is given past `horizon`, the
/// least time of the groups that are not among these, nor once the group whose turn it is may have tasks that are not among the candidates.
pub fn admit(
    states: &mut [State],
    limits: &[Limit],
    lanes: &[Lane],
    groups: &[Group],
    candidates: &[Candidate],
    costs: &[i64],
    max: usize,
    horizon: f64,
    now: i64,
) -> Round {
    let mut round = Round { charged: vec![0; groups.len()], ..Round::default() };
    let mut waiting: Vec<VecDeque<usize>> = vec![VecDeque::new(); groups.len()];
    candidates.iter().enumerate().for_each(|(at, candidate)| waiting[lanes[candidate.lane].group].push_back(at));
    let mut shut = vec![false; lanes.len()];
    let turn = |group: usize, charged: i64, first: usize| Reverse((Time(groups[group].at + time(charged, groups[group].weight)), first, group));
    let mut turns: BinaryHeap<_> = (0..groups.len()).filter_map(|group| Some(turn(group, 0, *waiting[group].front()?))).collect();
    while round.admitted.len() < max {
        let Some(Reverse((at, _, group))) = turns.pop() else { break };
        if at.0 > horizon && !round.admitted.is_empty() {
            break;
        }
        let mut taken = None;
        while let Some(index) = waiting[group].pop_front() {
            let Candidate { lane, tokens } = candidates[index];
            if shut[lane] {
                continue;
            }
            if lanes[lane].draws.iter().all(|budget| limits[*budget].admits(states[*budget], tokens, now)) {
                taken = Some(index);
                break;
            }
            shut[lane] = true;
            round.refused.push(index);
        }
        if let Some(index) = taken {
            let Candidate { lane, tokens } = candidates[index];
            for budget in lanes[lane].draws {
                states[*budget] = states[*budget].plus(limits[*budget].cost(tokens));
            }
            round.admitted.push(index);
            round.charged[group] = round.charged[group].saturating_add(costs[index]);
        }
        match waiting[group].front() {
            Some(first) => turns.push(turn(group, round.charged[group], *first)),
            None if lanes.iter().enumerate().any(|(lane, known)| known.group == group && known.more && !shut[lane]) => break,
            None => {}
        }
    }
    round
}

/// A time in its order; none is NaN.
#[derive(Clone, Copy, PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lane(group: usize) -> Lane<'static> {
        Lane { group, draws: &[], more: false }
    }

    fn group(at: f64, weight: f64) -> Group {
        Group { at, weight }
    }

    fn waiting(lanes: &[usize]) -> Vec<Candidate> {
        lanes.iter().map(|lane| Candidate { lane: *lane, tokens: None }).collect()
    }

    #[test]
    fn a_missing_or_zero_prediction_is_not_free() {
        assert_eq!(charge(Some(7), Some(9)), 7);
        assert_eq!(charge(Some(0), Some(9)), 9);
        assert_eq!(charge(None, Some(0)), UNPREDICTED);
        assert_eq!(charge(None, None), UNPREDICTED);
    }

    #[test]
    fn tokens_are_shared_by_weight_and_not_by_tasks() {
        // Group 0 has tasks of 10 tokens and weight 1, group 1 of 30 tokens and weight 3: one task of each in turn.
        let round = admit(
            &mut [],
            &[],
            &[lane(0), lane(1)],
            &[group(0.0, 1.0), group(0.0, 3.0)],
            &waiting(&[0, 0, 0, 1, 1, 1]),
            &[10, 10, 10, 30, 30, 30],
            4,
            f64::INFINITY,
            0,
        );
        assert_eq!(round, Round { admitted: vec![0, 3, 1, 4], refused: vec![], charged: vec![20, 60] });
    }

    #[test]
    fn a_group_without_room_is_passed_by_and_its_other_lanes_are_not() {
        let narrow = Limit { max_running: Some(0), ..Limit::default() };
        let lanes = [Lane { group: 0, draws: &[0], more: false }, lane(0), lane(1)];
        let round = admit(
            &mut [State::default()],
            &[narrow],
            &lanes,
            &[group(0.0, 1.0), group(5.0, 1.0)],
            &waiting(&[0, 0, 1, 2]),
            &[1, 1, 1, 1],
            9,
            f64::INFINITY,
            0,
        );
        assert_eq!(round, Round { admitted: vec![2, 3], refused: vec![0], charged: vec![1, 1] });
    }

    #[test]
    fn no_turn_is_given_that_may_be_anothers() {
        let groups = [group(0.0, 1.0), group(4.0, 1.0)];
        // Past the horizon others would have the turn; the first turn is given all the same.
        let round = |horizon, more| {
            let lanes = [Lane { more, ..lane(0) }, lane(1)];
            admit(&mut [], &[], &lanes, &groups, &waiting(&[0, 0, 1]), &[1, 1, 1], 9, horizon, 0).admitted
        };
        assert_eq!(round(f64::INFINITY, false), [0, 1, 2]);
        assert_eq!(round(3.0, false), [0, 1]);
        assert_eq!(round(-1.0, false), [0]);
        assert_eq!(round(f64::INFINITY, true), [0, 1]);
    }

    proptest! {
        #[test]
        fn groups_that_wait_get_the_same_by_weight_but_for_one_task_of_each(
            weights in prop::collection::vec(1u32..8, 2..6),
            sizes in prop::collection::vec(1i64..500, 2..6),
            max in 1usize..300,
        ) {
            let groups: Vec<Group> = weights.iter().zip(&sizes).map(|(weight, _)| group(0.0, f64::from(*weight))).collect();
            let lanes: Vec<Lane> = (0..groups.len()).map(lane).collect();
            let candidates: Vec<Candidate> = (0..groups.len()).flat_map(|lane| vec![Candidate { lane, tokens: None }; max]).collect();
            let costs: Vec<i64> = candidates.iter().map(|candidate| sizes[candidate.lane]).collect();
            let round = admit(&mut [], &[], &lanes, &groups, &candidates, &costs, max, f64::INFINITY, 0);
            prop_assert_eq!(round.admitted.len(), max);
            let times: Vec<f64> = groups.iter().zip(&round.charged).map(|(group, charged)| time(*charged, group.weight)).collect();
            for (one, at) in times.iter().enumerate() {
                for (other, least) in times.iter().enumerate() {
                    let most = time(sizes[one], groups[one].weight).max(time(sizes[other], groups[other].weight));
                    prop_assert!(at - least <= most + 1e-6, "{at} and {least}");
                }
            }
        }
    }
}
