//! The arithmetic of budgets: what a task reserves, which of the tasks that wait may start, and what an attempt that ended is charged. All budgets of a task
//! must have room, decided in one step, all or nothing; within a lane nothing overtakes a task that waits for room, so a big task is never starved by small ones.

use crate::window::Spent;

/// What is in use of a budget.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tasks running.
    pub running: i64,
    /// Predicted tokens of the running tasks.
    pub tokens: i64,
}

impl Usage {
    /// The sum, saturating.
    pub fn plus(self, other: Usage) -> Usage {
        Usage { running: self.running.saturating_add(other.running), tokens: self.tokens.saturating_add(other.tokens) }
    }

    /// The difference, saturating.
    pub fn minus(self, other: Usage) -> Usage {
        Usage { running: self.running.saturating_sub(other.running), tokens: self.tokens.saturating_sub(other.tokens) }
    }
}

/// Where a budget stands: what is in use, and what its window remembers as spent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// In use now.
    pub usage: Usage,
    /// Spent within the window.
    pub spent: Spent,
}

impl State {
    /// The sum, saturating.
    pub fn plus(self, other: State) -> State {
        State { usage: self.usage.plus(other.usage), spent: self.spent.plus(other.spent) }
    }

    /// The difference; what is spent not below zero.
    pub fn minus(self, other: State) -> State {
        State { usage: self.usage.minus(other.usage), spent: self.spent.less(other.spent) }
    }
}

/// How much a token of each kind counts, since providers meter them apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// A token read that was not cached.
    pub input: f64,
    /// A token read that the provider had cached.
    pub cached: f64,
    /// A token written.
    pub output: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Weights { input: 1.0, cached: 1.0, output: 1.0 }
    }
}

impl Weights {
    /// What the reported tokens count as together, rounded up; `None` where none were reported. Cached tokens are part of the input.
    pub fn weigh(self, input: Option<i64>, cached: Option<i64>, output: Option<i64>) -> Option<i64> {
        if input.is_none() && cached.is_none() && output.is_none() {
            return None;
        }
        let cached = cached.unwrap_or(0);
        let fresh = input.unwrap_or(cached).saturating_sub(cached).max(0);
        let sum = weighted(self.input, fresh) + weighted(self.cached, cached) + weighted(self.output, output.unwrap_or(0));
        Some(sum.ceil() as i64)
    }
}

/// Weights are written in decimal: 0.1 means 0.1 and not the binary fraction nearest to it.
fn weighted(weight: f64, tokens: i64) -> f64 {
    let millionths = (weight * 1e6).round();
    millionths * tokens as f64 / 1e6
}

/// The limits of a budget; `None` does not limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// Most tasks running at once.
    pub max_running: Option<i64>,
    /// Most predicted tokens in flight.
    pub max_tokens: Option<i64>,
    /// Tokens of a task that predicts none.
    pub default_tokens: Option<i64>,
    /// Length of the window in microseconds; 0 where there is none.
    pub per: i64,
    /// Most attempts begun within the window.
    pub max_requests: Option<i64>,
    /// Most tokens within the window.
    pub max_window_tokens: Option<i64>,
    /// Money in millionths: nothing starts while so much was spent within the window.
    pub max_cost: Option<i64>,
    /// How much a token of each kind counts.
    pub weights: Weights,
    /// Nothing starts before this instant.
    pub throttled_until: i64,
}

impl Default for Limit {
    fn default() -> Self {
        Limit {
            max_running: None,
            max_tokens: None,
            default_tokens: None,
            per: 0,
            max_requests: None,
            max_window_tokens: None,
            max_cost: None,
            weights: Weights::default(),
            throttled_until: i64::MIN,
        }
    }
}

impl Limit {
    /// The most tokens that a task may predict at all, if tokens are limited.
    pub fn capacity(&self) -> Option<i64> {
        match (self.max_tokens, self.max_window_tokens) {
            (Some(flight), Some(window)) => Some(flight.min(window)),
            (flight, window) => flight.or(window),
        }
    }

    /// What a task with this prediction reserves of the budget. A missing or zero prediction is never free where tokens are limited: it counts as the
    /// default, and without one as the whole limit, so that it runs alone.
    pub fn cost(&self, predicted: Option<i64>) -> State {
        let tokens = predicted.filter(|tokens| *tokens > 0).or(self.default_tokens).or(self.capacity().map(|all| all.max(1))).unwrap_or(0);
        let spent = if self.per > 0 { Spent { requests: 1, tokens, cost: 0 } } else { Spent::default() };
        State { usage: Usage { running: 1, tokens }, spent }
    }

    /// Whether the budget has room for a task of this prediction beside what `state` says.
    pub fn admits(&self, state: State, predicted: Option<i64>, now: i64) -> bool {
        let after = state.plus(self.cost(predicted));
        now >= self.throttled_until
            && within(after.usage.running, self.max_running)
            && within(after.usage.tokens, self.max_tokens)
            && within(after.spent.requests, self.max_requests)
            && within(after.spent.tokens, self.max_window_tokens)
            && self.max_cost.is_none_or(|max| state.spent.cost < max)
    }

    /// Whether there is no room for any task at all.
    pub fn shut(&self, state: State, now: i64) -> bool {
        let full = |used: i64, max: Option<i64>| max.is_some_and(|max| used >= max);
        now < self.throttled_until
            || full(state.usage.running, self.max_running)
            || full(state.usage.tokens, self.max_tokens)
            || full(state.spent.requests, self.max_requests)
            || full(state.spent.tokens, self.max_window_tokens)
            || full(state.spent.cost, self.max_cost)
    }

    /// Whether a task of this prediction could run on an idle budget.
    pub fn could_ever_run(&self, predicted: Option<i64>) -> bool {
        self.admits(State::default(), predicted, i64::MAX)
    }

    /// Whether `spent` leaves room in the window for a task of this prediction.
    pub fn window_admits(&self, spent: Spent, predicted: Option<i64>) -> bool {
        self.admits(State { usage: Usage::default(), spent }, predicted, i64::MAX)
    }
}

fn within(used: i64, max: Option<i64>) -> bool {
    max.is_none_or(|max| used <= max)
}

/// What the end of an attempt changes in a window that was charged a reservation when it began: taken back where the attempt began, and owed where it ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settlement {
    /// Reserved and not used.
    pub refund: Spent,
    /// Used above what was reserved.
    pub debt: Spent,
}

impl Settlement {
    /// Of an attempt that reserved `reserved` tokens and used `charged`, at this cost.
    pub fn of(reserved: i64, charged: i64, cost: i64) -> Self {
        Settlement {
            refund: Spent { requests: 0, tokens: reserved.saturating_sub(charged).max(0), cost: 0 },
            debt: Spent { requests: 0, tokens: charged.saturating_sub(reserved).max(0), cost },
        }
    }

    /// Of an attempt that is as if it had never begun.
    pub fn released(reserved: i64) -> Self {
        Settlement { refund: Spent { requests: 1, tokens: reserved, cost: 0 }, debt: Spent::default() }
    }
}

/// A task that waits: the lane it stands in (an index) and the tokens it predicts.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Index into the lanes.
    pub lane: usize,
    /// Predicted tokens, if any.
    pub tokens: Option<i64>,
}

/// Admits waiting tasks in their order and adds what they reserve to `states`. `lanes[i]` lists, as indices into `limits` and `states`, the budgets that lane i
/// draws on. A lane is passed over from its first task that finds no room. Returns the indices of the admitted candidates, at most `max`.
pub fn admit<L: AsRef<[usize]>>(states: &mut [State], limits: &[Limit], lanes: &[L], candidates: &[Candidate], max: usize, now: i64) -> Vec<usize> {
    let mut shut = vec![false; lanes.len()];
    let mut admitted = Vec::with_capacity(max.min(candidates.len()));
    for (at, candidate) in candidates.iter().enumerate() {
        if admitted.len() == max {
            break;
        }
        if shut[candidate.lane] {
            continue;
        }
        let draws = lanes[candidate.lane].as_ref();
        if draws.iter().all(|budget| limits[*budget].admits(states[*budget], candidate.tokens, now)) {
            for budget in draws {
                states[*budget] = states[*budget].plus(limits[*budget].cost(candidate.tokens));
            }
            admitted.push(at);
        } else {
            shut[candidate.lane] = true;
        }
    }
    admitted
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::Window;
    use proptest::prelude::*;

    fn limit(max_running: i64, max_tokens: i64) -> Limit {
        Limit { max_running: Some(max_running), max_tokens: Some(max_tokens), ..Limit::default() }
    }

    fn in_use(running: i64, tokens: i64) -> State {
        State { usage: Usage { running, tokens }, spent: Spent::default() }
    }

    #[test]
    fn a_missing_or_zero_prediction_is_not_free() {
        assert_eq!(limit(4, 100).cost(None).usage.tokens, 100);
        assert_eq!(limit(4, 100).cost(Some(0)).usage.tokens, 100);
        let with_default = Limit { default_tokens: Some(7), ..limit(4, 100) };
        assert_eq!(with_default.cost(Some(0)).usage.tokens, 7);
        let windowed = Limit { per: 60, max_window_tokens: Some(40), ..Limit::default() };
        assert_eq!(windowed.cost(None).spent, Spent { requests: 1, tokens: 40, cost: 0 });
        assert!(!Limit { max_tokens: Some(0), ..Limit::default() }.could_ever_run(None));
    }

    #[test]
    fn nothing_overtakes_a_task_that_waits_for_tokens_in_its_lane() {
        let mut states = [in_use(1, 60)];
        let waiting = [Candidate { lane: 0, tokens: Some(50) }, Candidate { lane: 0, tokens: Some(1) }];
        assert!(admit(&mut states, &[limit(9, 100)], &[[0]], &waiting, 9, 0).is_empty());
    }

    #[test]
    fn a_lane_without_room_does_not_hold_up_another() {
        let mut states = [in_use(1, 0), State::default()];
        let waiting = [Candidate { lane: 0, tokens: Some(1) }, Candidate { lane: 1, tokens: Some(1) }];
        assert_eq!(admit(&mut states, &[limit(1, 100), limit(1, 100)], &[[0], [1]], &waiting, 9, 0), [1]);
    }

    #[test]
    fn a_task_waiting_for_a_narrow_limit_holds_no_slot_of_the_wide_one() {
        let mut states = [in_use(1, 0), State::default()];
        let waiting = [Candidate { lane: 0, tokens: None }];
        let narrow = Limit { max_running: Some(1), ..Limit::default() };
        let wide = Limit { max_running: Some(100), ..Limit::default() };
        assert!(admit(&mut states, &[narrow, wide], &[[0, 1]], &waiting, 9, 0).is_empty());
        assert_eq!(states[1], State::default());
    }

    #[test]
    fn a_throttled_budget_admits_nothing_until_its_instant() {
        let limit = Limit { throttled_until: 10, ..limit(9, 100) };
        let waiting = [Candidate { lane: 0, tokens: Some(1) }];
        assert!(admit(&mut [State::default()], &[limit], &[[0]], &waiting, 9, 9).is_empty());
        assert_eq!(admit(&mut [State::default()], &[limit], &[[0]], &waiting, 9, 10), [0]);
        assert!(limit.could_ever_run(Some(1)));
    }

    #[test]
    fn nothing_starts_while_the_money_of_the_window_is_spent() {
        let limit = Limit { per: 60, max_cost: Some(5), ..Limit::default() };
        let spent = |cost| State { usage: Usage::default(), spent: Spent { requests: 0, tokens: 0, cost } };
        assert!(limit.admits(spent(4), None, 0) && !limit.admits(spent(5), None, 0) && limit.shut(spent(5), 0));
    }

    #[test]
    fn tokens_are_weighed_by_their_kind_and_rounded_up() {
        let weights = Weights { input: 1.0, cached: 0.1, output: 5.0 };
        assert_eq!(weights.weigh(Some(100), Some(40), Some(7)), Some(60 + 4 + 35));
        assert_eq!(weights.weigh(Some(100), Some(41), None), Some(59 + 5));
        assert_eq!(weights.weigh(None, Some(10), None), Some(1));
        assert_eq!(weights.weigh(Some(0), None, None), Some(0));
        assert_eq!(weights.weigh(None, None, None), None);
        assert_eq!(Weights { cached: 0.1, ..weights }.weigh(Some(30), Some(30), None), Some(3));
    }

    proptest! {
        #[test]
        fn admission_never_passes_a_limit_and_costs_exactly_what_it_admits(
            limits in prop::collection::vec((1i64..6, 1i64..200, 1i64..8, 1i64..300), 1..4),
            tasks in prop::collection::vec((0usize..4, prop::option::of(0i64..150)), 0..30),
            max in 0usize..20,
        ) {
            let limits: Vec<Limit> = limits.into_iter().map(|(running, tokens, requests, window_tokens)| {
                Limit { per: 60, max_requests: Some(requests), max_window_tokens: Some(window_tokens), ..limit(running, tokens) }
            }).collect();
            let lanes: Vec<Vec<usize>> = (0..4usize).map(|lane| (0..limits.len()).filter(|budget| lane >> budget & 1 == 1).collect()).collect();
            let waiting: Vec<Candidate> = tasks.into_iter().map(|(lane, tokens)| Candidate { lane, tokens }).collect();
            let mut states = vec![State::default(); limits.len()];
            let admitted = admit(&mut states, &limits, &lanes, &waiting, max, 0);
            prop_assert!(admitted.len() <= max);
            for (budget, limit) in limits.iter().enumerate() {
                let state = states[budget];
                prop_assert!(within(state.usage.running, limit.max_running) && within(state.usage.tokens, limit.max_tokens));
                prop_assert!(within(state.spent.requests, limit.max_requests) && within(state.spent.tokens, limit.max_window_tokens));
                let sum = admitted.iter().map(|at| &waiting[*at]).filter(|task| lanes[task.lane].contains(&budget))
                    .fold(State::default(), |sum, task| sum.plus(limit.cost(task.tokens)));
                prop_assert_eq!(sum, state);
                prop_assert!(!limit.shut(state, 0) || !limit.admits(state, Some(1), 0));
            }
            for lane in 0..4 {
                let taken: Vec<bool> = waiting.iter().enumerate().filter(|(_, task)| task.lane == lane).map(|(at, _)| admitted.contains(&at)).collect();
                prop_assert!(taken.windows(2).all(|pair| pair[0] || !pair[1]), "a task overtook another of its lane");
            }
        }

        /// Attempts begin when they are admitted, and end with less, the same or more than they reserved, are released, or never end.
        #[test]
        fn no_span_of_the_window_passes_a_limit_but_by_what_attempts_used_above_their_prediction(
            per in 60i64..20_000, max_requests in 1i64..12, max_window_tokens in 1i64..300, max_cost in 1i64..50,
            steps in prop::collection::vec((0i64..2_000, 1i64..80, 0u8..5, 0i64..120, 0i64..20), 1..150),
        ) {
            let limit = Limit { per, max_requests: Some(max_requests), max_window_tokens: Some(max_window_tokens), max_cost: Some(max_cost), ..Limit::default() };
            let mut window = Window::new(per);
            let mut now = 1_000_000;
            // (began, requests, tokens within the reservation), (ended, tokens above it, cost), and the truth to rebuild from.
            let (mut begun, mut running, mut owed): (Vec<(i64, i64, i64)>, Vec<usize>, Vec<(i64, i64, i64)>) = Default::default();
            for (gap, predicted, end, actual, cost) in steps {
                now += gap;
                window.advance(per, now);
                let mut states = [State { usage: Usage::default(), spent: window.total() }];
                if admit(&mut states, &[limit], &[[0]], &[Candidate { lane: 0, tokens: Some(predicted) }], 1, now) == [0] {
                    let recent = owed.iter().filter(|(at, ..)| now - at < per).map(|(_, _, cost)| cost).sum::<i64>();
                    prop_assert!(recent < max_cost, "admitted with {recent} of {max_cost} spent");
                    window.charge(limit.cost(Some(predicted)).spent);
                    running.push(begun.len());
                    begun.push((now, 1, predicted));
                }
                if end > 0 && !running.is_empty() {
                    let at = running.remove(end as usize % running.len());
                    let (started, _, reserved) = begun[at];
                    let settlement = match end {
                        1 => Settlement::released(reserved),
                        2 => Settlement::of(reserved, reserved, 0),
                        _ => Settlement::of(reserved, actual, cost),
                    };
                    window.refund(started, settlement.refund);
                    window.charge_at(now, settlement.debt);
                    begun[at].1 -= settlement.refund.requests;
                    begun[at].2 -= settlement.refund.tokens;
                    owed.push((now, settlement.debt.tokens, settlement.debt.cost));
                }
            }
            for (at, (first, ..)) in begun.iter().enumerate() {
                let span = || begun[at..].iter().filter(|(later, ..)| later - first < per);
                prop_assert!(span().map(|(_, requests, _)| requests).sum::<i64>() <= max_requests);
                prop_assert!(span().map(|(_, _, tokens)| tokens).sum::<i64>() <= max_window_tokens);
            }
            let mut rebuilt = Window::new(per);
            let mut events: Vec<(i64, Spent)> = begun.iter().map(|(at, requests, tokens)| (*at, Spent { requests: *requests, tokens: *tokens, cost: 0 }))
                .chain(owed.iter().map(|(at, tokens, cost)| (*at, Spent { requests: 0, tokens: *tokens, cost: *cost }))).collect();
            events.sort_by_key(|(at, _)| *at);
            for (at, spent) in events {
                rebuilt.remember(per, at, spent);
            }
            rebuilt.advance(per, now);
            prop_assert_eq!(rebuilt.total(), window.total());
            prop_assert_eq!(rebuilt.next(), window.next());
        }
    }
}
