"""The paper's design questions, answered on a user's model and images.

| file       | what it is for                                                                                  |
| ---        | ---                                                                                             |
| config     | the settings of a study                                                                         |
| questions  | what is asked: six sweeps over settings of `keepgrad.apply`                                    |
| subject    | the model and its data: what one setting measures, and what a short training with it gives      |
| results    | what has been found so far, by setting, in one file; the CSV files                              |
| run        | all of a study, from the first setting to the report                                            |
| findings   | what the figures say: the Pareto front, the recommendation, an answer to each question          |
| figures    | the pictures                                                                                    |
| page       | the report as one HTML file                                                                     |
"""
